"""One forward per text: for networks whose attention cannot be packed.

Those with sliding windows or attention written by hand run as transformers made them, with a cache
of transformers per text.  Windowed layers keep everything in it, so that what was rejected can be
dropped; their mask hides what is out of reach.  Recurrences and convolutions: `recurrent`.
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache, cache_utils

from ...core.canvas import IntArray
from ...core.errors import ConfigError
from ...models import DiffusionModel
from ...models.forwards import CACHE
from ..base import Draft
from .base import Scored, Text, Verifier, Work, joined, once_per_network, recorded, running
from .stepping import States

WHOLE: Any = cache_utils.DynamicLayer
WINDOW = cache_utils.DynamicSlidingWindowLayer
# layers of a cache that can be cut to any length; those without keys are new in transformers 5.23
CUT = WHOLE, WINDOW, cache_utils.DynamicIndexedLayer, getattr(cache_utils, "DummyLayer", WHOLE)


@dataclass(eq=False)
class CachedText(Text):
    """A text with a cache of transformers.  ``kept``: per recurrent layer the states of the last
    forward; ``begun``: a forward has changed the cache, or tried to, and is not committed;
    ``scored``: its draft and what it gave."""

    cache: Any = field(default=None, repr=False)
    kept: list[States] = field(default_factory=list, repr=False)
    begun: bool = False
    scored: tuple[Draft, Scored] | None = field(default=None, repr=False)


class RowVerifier(Verifier):
    """Scores chains text by text."""

    trees = False

    def __init__(
        self, model: DiffusionModel, target_layer_ids: tuple[int, ...] = (), exact: bool = True
    ) -> None:
        super().__init__(model, target_layer_ids, exact)
        self._accepted = set(inspect.signature(self.hf.forward).parameters)
        takes_any = getattr(self.hf, "_supports_default_dynamic_cache", lambda: True)
        # RecurrentGemma's modules hold the states; CPM-Ant wants the whole text beside its cache
        own = hasattr(self.hf, "_setup_cache") or hasattr(self.hf, "cpmant")
        if CACHE not in self._accepted or not takes_any() or own:
            raise ConfigError(
                f"{type(self.hf).__name__} keeps its state in a form of its own, not in a cache of "
                "transformers: it cannot verify drafts; use another model"
            )
        # networks that dispatch their attention can be told to use the exact one
        backend = getattr(self.hf, "_supports_attention_backend", False)
        self._attention = "eager" if self.exact and backend else None
        self.whole_prefixes |= any(map(remembers, self._new_cache().layers))

    def _new(self, prompt: IntArray, limit: int) -> CachedText:
        return CachedText(prompt.tolist(), limit, cache=self._new_cache())

    def _new_cache(self) -> Cache:
        cache = DynamicCache(config=self.hf.config.get_text_config())
        cache.layers = [WHOLE() if type(one) is WINDOW else one for one in cache.layers]
        return cache

    def check_drafts(self, trees: bool) -> None:
        super().check_drafts(trees)
        if not goes_on(self):
            raise ConfigError(
                f"{self.model.name} reads several tokens only at the start of a text, or otherwise "
                "than one by one: it cannot verify drafts; use another model, or drafter=None"
            )

    def score(self, work: Work) -> list[Scored]:
        return [self._once(text, draft) for text, draft in work]

    def _once(self, text: Any, draft: Draft) -> Scored:
        """Rows of a text: a draft changes its cache once, however often a round is tried anew."""
        if text.scored is None or text.scored[0] is not draft:
            if text.begun:
                self._restore(text)
            text.begun = True
            text.scored = draft, self._score(text, draft)
        scored: Scored = text.scored[1]
        return scored

    def _restore(self, text: Any) -> None:
        """Have the cache hold the cached tokens again, after a forward that failed."""
        for layer in text.cache.layers:
            layer.crop(text.cached - layer.get_seq_length())

    def commit(
        self, text: Any, draft: Draft, path: Sequence[int], emitted: Sequence[int],
        hidden: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().commit(text, draft, path, emitted, hidden)
        text.begun, text.scored = False, None

    def close(self, text: Any) -> None:
        if text.begun:
            text.weights = None  # what its cache holds is not what was committed: not to be kept
        super().close(text)

    def _score(self, text: Any, draft: Draft) -> Scored:
        if not draft.is_chain:
            self.check_drafts(trees=True)  # of a drafter that does not say what it makes
        ids = [*text.fresh, *draft.tokens.tolist()]
        return self._feed(text, ids, len(draft) + 1, text.cached)

    def _feed(self, text: Any, ids: Sequence[int], wanted: int, first: int = 0) -> Scored:
        """A forward of ``ids`` behind ``first`` cached tokens; logits of the last ``wanted``."""
        at = torch.arange(first, first + len(ids), device=self.model.device)[None]
        more = {"logits_to_keep": wanted, "position_ids": at}  # without, Bamba counts from 0
        more = {name: more[name] for name in self._accepted & more.keys()}
        with (
            torch.inference_mode(),
            running(self.hf, self._attention),
            recorded(self.hf, self.target_layer_ids) as outputs,
        ):
            logits: torch.Tensor = self.hf(
                input_ids=torch.tensor([ids], device=self.model.device), use_cache=True,
                **{CACHE: text.cache}, **more,
            ).logits[0, -wanted:]  # fmt: skip
        text.forwards += 1
        text.computed += len(ids)
        return Scored(logits, joined(outputs, self.target_layer_ids))

    def _keep(self, text: Any, draft: Draft, path: Sequence[int]) -> None:
        if len(path) < len(draft):
            text.cache.crop(len(path) - len(draft))

    def _release(self, text: Any) -> None:
        text.cache, text.kept = None, []

    @torch.inference_mode()
    def _copy(self, kept: Any, text: Any, n: int) -> None:
        text.cache = copy.deepcopy(kept.cache)
        if n < kept.cached:
            text.cache.crop(n - kept.cached)


@once_per_network
def goes_on(verifier: RowVerifier) -> bool:
    """Whether several tokens behind a text give the logits that they give one by one, and the cache
    holds nothing of them that cannot be taken back.  Jamba's do not in transformers, and those of
    encoders see what stands behind them."""
    ids = [n * 7 % verifier.model.facts.vocab_size for n in range(2, 11)]
    rows = []
    try:
        for sizes in ((5, 4), (5, 1, 1, 1, 1)):
            text, at, outs = verifier._new(np.asarray(ids), len(ids)), 0, []
            for size in sizes:
                outs.append(verifier._feed(text, ids[at : at + size], size, at).logits.float())
                at += size
                for layer in text.cache.layers:
                    layer.crop(0)
            rows.append(torch.cat(outs[1:]))
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError):
        return False  # it does not take such pieces
    return verifier.agree(*rows) and not any(map(remembers, text.cache.layers))


def remembers(layer: Any) -> bool:
    """Whether a layer of a cache keeps more than keys and values of every token."""
    if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
        return bool(layer.is_recurrent_states_initialized[0])
    return type(layer) not in CUT
