"""Hybrid networks: recurrent layers beside attention (Qwen3.5, Qwen3-Next, Nemotron-H and others).

Keys and values of rejected tokens can be dropped; a recurrent state that has taken them in cannot.
Two ways back, `rollback`:

- ``"states"``: the drafted tokens pass through the recurrence one by one, as in plain decoding,
  and the state behind each of them is kept until the draft is judged.  All products with weights
  are still one forward over all tokens.  For gated delta networks and Mamba-2, whose recurrences
  are functions of their modules in transformers.
- ``"replay"``: the states before the forward are copied; when something was rejected they are
  put back and a second forward feeds what was accepted.  For any recurrence that goes on from a
  state with several tokens at once, which is tried out once per network: Jamba's does not in
  transformers, so it writes plainly only.  Equal to plain decoding up to rounding.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...core.canvas import IntArray
from ...core.errors import ConfigError
from ...models import DiffusionModel
from ..base import Draft
from .base import Scored, running
from .rowwise import CachedText, RowVerifier

ROLLBACKS = ("states", "replay")
ROUNDING = 0.05  # of the largest logit: what two orders of the same sums may differ by
_GOES_ON: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
_GOES_ON_LOCK = threading.Lock()
States = list[torch.Tensor]  # behind the last committed token and behind every drafted one


@dataclass(eq=False)
class RecurrentText(CachedText):
    """``kept``: per recurrent layer the states of the last forward, or with "replay" the one before
    it; ``convolved``: the windows of its convolutions before it."""

    kept: list[States] = field(default_factory=list, repr=False)
    convolved: list[torch.Tensor | None] = field(default_factory=list, repr=False)
    fed: int = 0  # tokens of the last forward, the draft included


class RecurrentVerifier(RowVerifier):
    """Scores chains text by text; every text has states of its own."""

    trees = False
    whole_prefixes = True  # the states are those behind the last token

    def __init__(
        self, model: DiffusionModel, target_layer_ids: tuple[int, ...] = (), exact: bool = True,
        rollback: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, target_layer_ids, exact)
        known = _recurrences(self.hf)
        self.rollback = rollback or ("states" if known else "replay")
        if self.rollback not in ROLLBACKS or (self.rollback == "states" and not known):
            raise ConfigError(f"{model.name} rolls back by replay, not by {self.rollback!r}")
        self.known = known

    def _new_cache(self) -> Cache:
        cache = DynamicCache(config=self.hf.config.get_text_config())
        cache.activate_past_recording()  # type: ignore[no-untyped-call]
        return cache

    def _new(self, prompt: IntArray, limit: int) -> RecurrentText:
        return RecurrentText(prompt.tolist(), limit, cache=self._new_cache())

    def _score(self, text: Any, draft: Draft) -> Scored:
        if not draft.is_chain and len(draft):
            raise ConfigError(
                f"{self.model.name} has recurrent layers, which read one token after the other: "
                "use a search that returns a chain"
            )
        if len(draft) and not self.known and not goes_on(self):
            raise ConfigError(
                f"the recurrent layers of {self.model.name} read several tokens only at the start "
                "of a text, so that it cannot verify drafts; use another model, or drafter=None"
            )
        layers = _recurrent(text.cache)
        text.kept, text.convolved, text.fed = [], [], len(text.fresh) + len(draft)
        if self.rollback == "replay" and len(draft):
            # a layer that has not run yet has no state: replaying starts with a new cache
            text.kept = [[s.clone()] for layer in layers if (s := layer.recurrent_states[0])
                         is not None]  # fmt: skip
            text.convolved = [layer.conv_states[0] for layer in layers]
        stepped = self.rollback == "states" and len(draft) > 0
        with (
            running(self.hf, None),
            _stepping(len(draft), text.kept) if stepped else nullcontext(),
        ):
            scored = super()._score(text, draft)
        if stepped and len(text.kept) != sum(map(_remembers, _recurrent(text.cache))):
            raise ConfigError(
                f"{self.model.name} computes recurrent layers in an unknown way: it cannot verify "
                "drafts; use drafter=None"
            )
        return scored

    @torch.inference_mode()
    def _keep(self, text: Any, draft: Draft, path: Sequence[int]) -> None:
        rejected = len(draft) - len(path)
        states = [layer for layer in _recurrent(text.cache) if _remembers(layer)]
        if rejected and states and self.rollback == "replay":
            self._replay(text, draft, path)
        else:
            for layer in text.cache.layers:
                layer.crop(-rejected)
            for layer, kept in zip(states, text.kept, strict=bool(rejected)):
                if rejected:
                    layer.recurrent_states[0].copy_(kept[len(path)])
        text.kept, text.convolved = [], []

    def _replay(self, text: Any, draft: Draft, path: Sequence[int]) -> None:
        """Put the states before the forward back and feed what was accepted."""
        ids = np.concatenate([np.asarray(text.fresh, np.int64), draft.tokens[: len(path)]])
        if text.cached == 0:
            text.cache = self._new_cache()
        else:
            states = iter(text.kept)
            convolved = iter(text.convolved)
            for layer in text.cache.layers:
                if not isinstance(layer, LinearAttentionCacheLayerMixin):
                    layer.crop(-text.fed)
                    continue
                if hasattr(layer, "keys"):  # attention and recurrence side by side
                    layer.crop(-text.fed)
                window = next(convolved)
                if window is not None:
                    layer.conv_states[0] = window
                if _remembers(layer):
                    kept: Any = layer.recurrent_states[0]
                    kept.copy_(next(states)[0])
        self._feed(text, ids)

    @torch.inference_mode()
    def _restore(self, text: Any) -> None:
        text.cache = self._new_cache()
        if text.cached:
            self._feed(text, text.prefix[: text.cached])

    def _feed(self, text: Any, ids: IntArray) -> None:
        """A forward over ``ids`` for the cache alone."""
        more = {"logits_to_keep": 1} if self._few_logits else {}
        with running(self.hf, self._attention):
            self.hf(input_ids=self._tensor(ids)[None], past_key_values=text.cache, use_cache=True,
                    **more)  # fmt: skip
        for layer in text.cache.layers:
            layer.crop(0)
        text.forwards += 1
        text.computed += len(ids)

    def _release(self, text: Any) -> None:
        super()._release(text)
        text.kept, text.convolved = [], []


def goes_on(verifier: RecurrentVerifier) -> bool:
    """Whether several tokens behind a text give the logits they give in one piece with it."""
    hf = verifier.hf
    with _GOES_ON_LOCK:
        if hf not in _GOES_ON:
            ids = torch.arange(2, 11, device=verifier.model.device)[None] * 7
            ids = ids % verifier.model.facts.vocab_size
            with torch.inference_mode(), running(hf, verifier._attention):
                whole = hf(input_ids=ids).logits[0, 5:].float()
                cache = verifier._new_cache()
                for piece in (ids[:, :5], ids[:, 5:]):
                    out = hf(input_ids=piece, past_key_values=cache, use_cache=True)
            gap = (out.logits[0].float() - whole).abs().max() / whole.abs().max()
            _GOES_ON[hf] = bool(gap < ROUNDING)
        return _GOES_ON[hf]


def has_recurrent_layers(model: DiffusionModel) -> bool:
    """Whether some of its layers keep a state instead of keys and values in transformers' cache."""
    cache = DynamicCache(config=model.hf.config.get_text_config())
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


def _recurrent(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]


def _remembers(layer: Any) -> bool:
    return bool(layer.is_recurrent_states_initialized[0])


Step = Callable[..., Any]
_STEPPING = threading.local()  # of a thread's forward: tokens ``drafted``, states ``kept``
_STANDING = threading.Lock()


def _recurrences(hf: Any) -> bool:
    """Have the functions through which the layers of a network pass many tokens step where
    `_stepping` says so; whether there are any.  They belong to all networks of a kind, which other
    threads may run at the same time."""
    found = False
    for name in {type(module).__module__ for module in hf.modules()}:
        module = sys.modules[name]
        for chunk, step, make in (
            ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", _delta),
            ("mamba2_chunk_scan", "mamba2_selective_state_update", _mamba),
        ):
            if hasattr(module, chunk) and hasattr(module, step):
                found = True
                with _STANDING:
                    whole = getattr(module, chunk)
                    if not hasattr(whole, "steps"):
                        setattr(module, chunk, _standing(make, whole, getattr(module, step)))
    return found


def _standing(make: Step, chunk: Step, step: Step) -> Step:
    """``chunk``, which steps in a forward inside `_stepping`."""

    @wraps(chunk)
    def rule(*args: Any, **more: Any) -> Any:
        kept = getattr(_STEPPING, "kept", None)
        if kept is None:
            return chunk(*args, **more)
        return make(chunk, step, _STEPPING.drafted, kept, *args, **more)

    rule.steps = True  # type: ignore[attr-defined]
    return rule


@contextmanager
def _stepping(drafted: int, kept: list[States]) -> Iterator[None]:
    """Inside, the last ``drafted`` tokens of this thread's forward step through every recurrence,
    and each adds its states to ``kept``."""
    _STEPPING.drafted, _STEPPING.kept = drafted, kept
    try:
        yield
    finally:
        _STEPPING.kept = None


def _delta(
    chunk: Step, step: Step, drafted: int, kept: list[States], *args: torch.Tensor,
    initial_state: Any = None, g: torch.Tensor, beta: torch.Tensor, **more: Any,
) -> Any:  # fmt: skip
    """A gated delta rule over (B, T, ...): as plain decoding computes it, token by token."""
    given, total = [*args, g, beta], g.shape[1]
    head = total - drafted
    more |= {"output_final_state": True, "cu_seqlens": None}

    def run(rule: Step, first: int, last: int, state: Any) -> Any:
        *qkv, decay, rate = (x[:, first:last] for x in given)
        return rule(*qkv, g=decay, beta=rate, initial_state=state, **more)

    outs, states, state = [], [], initial_state
    pieces = [(0, head), *((t, t + 1) for t in range(head, total))]
    for first, last in pieces:
        rule = step if state is not None and last - first == 1 else chunk
        out, state = run(rule, first, last, state)
        outs.append(out)
        states.append(state.clone())
    kept.append(states)
    return torch.cat(outs, 1), state


def _mamba(
    chunk: Step, step: Step, drafted: int, kept: list[States], x: torch.Tensor, dt: torch.Tensor,
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, initial_states: Any = None, D: Any = None,
    dt_bias: Any = None, dt_softplus: bool = False, return_final_states: bool = True, **more: Any,
) -> Any:  # fmt: skip
    """Mamba-2 over x (B, T, heads, dim): as plain decoding computes it, token by token."""
    total, dim = x.shape[1], x.shape[-1]
    head = total - drafted
    outs, states, state = [], [], initial_states
    if state is None or head > 1:
        out, state = chunk(
            x[:, :head], dt[:, :head], a, b[:, :head], c[:, :head], initial_states=state, D=D,
            dt_bias=dt_bias, dt_softplus=dt_softplus, return_final_states=True, **more,
        )  # fmt: skip
        outs.append(out)
        states.append(state.clone())
    state = state.clone()  # is changed in place
    wide = a[:, None, None].expand(-1, dim, b.shape[-1])
    spread = [None if t is None else t[:, None].expand(-1, dim) for t in (D, dt_bias)]
    for t in range(total - drafted if outs else 0, total):
        out = step(
            state, x[:, t], dt[:, t, :, None].expand(-1, -1, dim), wide, b[:, t], c[:, t],
            spread[0], z=None, dt_bias=spread[1], dt_softplus=dt_softplus,
        )  # fmt: skip
        outs.append(out[:, None].to(outs[0].dtype if outs else out.dtype))
        states.append(state.clone())
    kept.append(states)
    return torch.cat(outs, 1), state
