"""One forward per text: for networks whose attention cannot be packed.

Those with sliding windows or attention written by hand run as transformers made them, with a cache
of transformers per text.  Recurrences and convolutions: `recurrent`.
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from ...core.canvas import IntArray
from ...core.errors import ConfigError
from ...models import DiffusionModel
from ..base import Draft
from .base import Scored, Text, Verifier, Work, joined, recorded, running

GROWTH = 256  # positions added to a layer's buffer at least when it is full
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
MASKABLE = ("eager", "sdpa")  # attention implementations that take any mask


class RollbackLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer in a buffer with room to grow: adding copies only what is new,
    removing copies nothing.  Windowed layers keep everything too, so that they can be rolled back;
    their mask hides what is out of reach."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (1, heads, n, head_dim); returns everything there is."""
        end = self.length + key_states.shape[-2]
        self.keys = self._room(self.keys, key_states, end)
        self.values = self._room(self.values, value_states, end)
        self.is_initialized = True
        self.keys[..., self.length : end, :] = key_states
        self.values[..., self.length : end, :] = value_states
        self.length = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def _room(self, held: torch.Tensor | None, new: torch.Tensor, end: int) -> torch.Tensor:
        if held is not None and end <= held.shape[-2]:
            return held
        shape = list(new.shape)
        shape[-2] = max(end + GROWTH, 2 * (0 if held is None else held.shape[-2]))
        grown = new.new_zeros(shape)
        if held is not None:
            grown[..., : self.length, :] = held[..., : self.length, :]
        return grown

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` positions."""
        self.length += tokens_to_remove

    def keep(self, start: int, offsets: Sequence[int]) -> None:
        """Of the positions from ``start`` on keep those at ``offsets``, moved together."""
        assert self.keys is not None and self.values is not None
        chosen = torch.tensor(offsets, dtype=torch.int64, device=self.keys.device) + start
        end = start + len(offsets)
        self.keys[..., start:end, :] = self.keys[..., chosen, :]
        self.values[..., start:end, :] = self.values[..., chosen, :]
        self.length = end


class VerifierCache(Cache):
    """`RollbackLayer`s, made as the network asks for them."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=RollbackLayer)

    @torch.inference_mode()
    def keep(self, start: int, offsets: Sequence[int]) -> None:
        """See `RollbackLayer.keep`."""
        layer: Any
        for layer in self.layers:
            layer.keep(start, offsets)


@dataclass(eq=False)
class CachedText(Text):
    """A text with a cache of transformers.  ``begun``: a forward has changed the cache, or tried
    to, and is not committed; ``scored``: its draft and what it gave."""

    cache: Any = field(default=None, repr=False)
    begun: bool = False
    scored: tuple[Draft, Scored] | None = field(default=None, repr=False)


class RowVerifier(Verifier):
    """Scores drafts text by text."""

    def __init__(
        self, model: DiffusionModel, target_layer_ids: tuple[int, ...] = (), exact: bool = True
    ) -> None:
        super().__init__(model, target_layer_ids, exact)
        accepted = inspect.signature(self.hf.forward).parameters
        if "past_key_values" not in accepted:
            raise ConfigError(
                f"{type(self.hf).__name__} keeps its state in a form of its own, not in a cache of "
                "transformers: it cannot verify drafts; use another model"
            )
        self._few_logits = "logits_to_keep" in accepted
        config = self.hf.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        # networks that dispatch their attention can be told to use the exact one
        backend = getattr(self.hf, "_supports_attention_backend", False)
        self._attention = "eager" if self.exact and backend else None
        used = self._attention or self.hf.config._attn_implementation
        self.implementation = used.removeprefix("dllm_")
        self.trees = kinds <= ATTENTION_LAYERS and self.implementation in MASKABLE

    def _new(self, prompt: IntArray, limit: int) -> CachedText:
        return CachedText(prompt.tolist(), limit, cache=self._new_cache())

    def _new_cache(self) -> Cache:
        return VerifierCache()

    def score(self, work: Work) -> list[Scored]:
        return [self._once(text, draft) for text, draft in work]

    def _once(self, text: Any, draft: Draft) -> Scored:
        """Rows of a text, whose cache is changed once for a draft, however often a round that fails
        for others is tried."""
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
            layer.crop(text.cached - layer.length)

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
        ids = np.concatenate([np.asarray(text.fresh, np.int64), draft.tokens])
        wanted = len(draft) + 1
        arguments: dict[str, Any] = {
            "input_ids": self._tensor(ids)[None],
            "past_key_values": text.cache,
            "use_cache": True,
        }
        if not draft.is_chain and len(draft) > 0:
            arguments |= self._tree_arguments(draft, text.cached, len(text.fresh))
        if self._few_logits:
            arguments["logits_to_keep"] = wanted
        with (
            torch.inference_mode(),
            running(self.hf, self._attention),
            recorded(self.hf, self.target_layer_ids) as outputs,
        ):
            logits: torch.Tensor = self.hf(**arguments).logits[0, -wanted:]
        text.forwards += 1
        text.computed += len(ids)
        return Scored(logits, joined(outputs, self.target_layer_ids))

    def _keep(self, text: Any, draft: Draft, path: Sequence[int]) -> None:
        if isinstance(text.cache, VerifierCache) and not draft.is_chain:
            text.cache.keep(len(text.tokens), path)
        else:
            text.cache.crop(len(path) - len(draft))

    def _release(self, text: Any) -> None:
        text.cache = None

    @torch.inference_mode()
    def _copy(self, kept: Any, text: Any, n: int) -> None:
        text.cache = copy.deepcopy(kept.cache)
        if n < kept.cached:
            text.cache.crop(n - kept.cached)

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.model.device)

    def _tree_arguments(self, draft: Draft, cached: int, fresh: int) -> dict[str, Any]:
        """Positions by depth, and a mask that shows every node its ancestors."""
        if not self.trees:
            raise ConfigError(
                f"{self.model.name} with {self.implementation} attention cannot score a tree; use "
                "a search that returns a chain, or attn_implementation='sdpa'"
            )
        depths = np.array([draft.depth(node) for node in range(len(draft))])
        positions = np.concatenate([np.arange(cached, cached + fresh), cached + fresh + depths])
        key_positions = np.concatenate([np.arange(cached), positions])
        seen = np.zeros((fresh + len(draft), cached + fresh + len(draft)), np.bool_)
        first = cached + fresh
        seen[:, :cached] = True
        seen[:fresh, cached:first] = np.tri(fresh, dtype=np.bool_)
        seen[fresh:, :first] = True
        seen[fresh:, first:] = draft.ancestry()
        return {
            "position_ids": self._tensor(positions)[None],
            "attention_mask": self._masks(seen, positions, key_positions),
        }

    def _masks(self, seen: Any, positions: IntArray, keys: IntArray) -> Any:
        """The additive mask (1, 1, Q, K); one per kind of layer where the network has several."""
        config = self.hf.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        near = seen if window is None else seen & (keys[None] > positions[:, None] - window)
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            return self._additive(near)
        masks = {"full_attention": seen, "sliding_attention": near}
        unknown = set(kinds) - set(masks)
        if unknown:
            raise ConfigError(f"{self.model.name} has {unknown} layers: use a chain, not a tree")
        if set(kinds) == {"full_attention"}:
            return self._additive(seen)
        return {kind: self._additive(mask) for kind, mask in masks.items()}

    def _additive(self, seen: Any) -> torch.Tensor:
        mask = torch.zeros(1, 1, *seen.shape, dtype=self.model.dtype, device=self.model.device)
        hidden = torch.from_numpy(~seen).to(mask.device)
        return mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
