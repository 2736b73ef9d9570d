"""Hybrid networks: recurrent layers beside attention (Qwen3.5, Qwen3-Next, Nemotron-H and others).

Keys and values of rejected tokens can be dropped; a recurrent state that has taken them in cannot.
So drafted tokens pass through the recurrences one by one, as in plain decoding, and the state
behind each of them is kept until the draft is judged (`stepping`).  All products with weights are
still one forward over all tokens.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...core.errors import ConfigError
from ...models import DiffusionModel
from ..base import Draft
from .base import Scored, running
from .rowwise import RowVerifier, remembers
from .stepping import recurrences, stepping


class RecurrentVerifier(RowVerifier):
    """Scores chains text by text; every text has states of its own."""

    whole_prefixes = True  # the states are those behind the last token

    @cached_property
    def steps(self) -> bool:
        """Whether tokens can pass through its recurrences one by one."""
        return bool(recurrences(self.hf))

    def _new_cache(self) -> Cache:
        cache = DynamicCache(config=self.hf.config.get_text_config())
        cache.activate_past_recording()  # type: ignore[no-untyped-call]
        return cache

    def check_drafts(self, trees: bool) -> None:
        if trees or not self.steps:
            super().check_drafts(trees)

    def _score(self, text: Any, draft: Draft) -> Scored:
        text.kept = []
        stepped = self.steps and len(draft) > 0
        with (
            running(self.hf, None),
            stepping(self.hf, len(draft), text.kept) if stepped else nullcontext(),
        ):
            scored = super()._score(text, draft)
        if len(draft) and len(text.kept) != sum(map(remembers, text.cache.layers)):
            raise ConfigError(
                f"{self.model.name} computes recurrent layers in an unknown way: it cannot verify "
                "drafts; use drafter=None"
            )
        return scored

    @torch.inference_mode()
    def _keep(self, text: Any, draft: Draft, path: Sequence[int]) -> None:
        rejected = len(draft) - len(path)
        cut(text.cache, rejected)
        states = [layer for layer in text.cache.layers if remembers(layer)]
        for layer, kept in zip(states, text.kept, strict=bool(rejected)):
            if rejected:
                layer.recurrent_states[0].copy_(kept[len(path)])
        text.kept = []

    @torch.inference_mode()
    def _restore(self, text: Any) -> None:
        text.cache = self._new_cache()
        if text.cached:
            self._feed(text, text.tokens[: text.cached], 1)
            cut(text.cache, 0)


def cut(cache: Any, count: int) -> None:
    """Drop the last ``count`` tokens.  Below transformers 5.23 layers without attention are states
    that stay empty, and those cannot be cropped."""
    for layer in cache.layers:
        if any(getattr(layer, "is_conv_states_initialized", {0: True}).values()):
            layer.crop(-count)


def has_recurrent_layers(model: DiffusionModel) -> bool:
    """Whether some of its layers keep a state instead of keys and values in transformers' cache."""
    cache = DynamicCache(config=model.hf.config.get_text_config())
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
