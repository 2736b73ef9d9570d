"""Recurrences that step through drafted tokens and keep the state behind each.

The only place of the library that exchanges functions of transformers: the modules of a hybrid
network pass many tokens at once through a function of their module, and inside `stepping` that
function takes the drafted ones one by one.  Without the exchange the states are put back and the
accepted tokens are fed again.  A round of 4 drafts took, in plain tokens (processor time, random
networks of 12 layers, one thread, 0, 2 and 4 drafts right):

    exchanged          Qwen3.5-like 1.6 1.5 1.5    Nemotron-H-like 2.3 2.1 2.1
    hooks, fed again   Qwen3.5-like 2.8 3.5 2.0    Nemotron-H-like 4.6 5.9 4.0

so that drafts pay on a CPU with it only.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch

States = list[torch.Tensor]  # behind the last committed token and behind every drafted one
Step = Callable[..., Any]
Recurrence = tuple[Any, str, str, Step]  # module, its two functions, what steps through them

_EXCHANGED = threading.RLock()


def recurrences(hf: Any) -> list[Recurrence]:
    """The functions through which the layers of a network pass many tokens: gated delta rules
    (Qwen3.5, Qwen3-Next, OLMo-hybrid), Mamba-2 (Nemotron-H, Falcon-H1, Bamba, Granite, Zamba2)."""
    kinds = (
        ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", _delta),
        ("mamba2_chunk_scan", "mamba2_selective_state_update", _mamba),
    )
    modules = [sys.modules[name] for name in {type(module).__module__ for module in hf.modules()}]
    return [
        (module, chunk, step, through)
        for module in modules for chunk, step, through in kinds
        if hasattr(module, chunk) and hasattr(module, step)
    ]  # fmt: skip


@contextmanager
def stepping(hf: Any, drafted: int, kept: list[States]) -> Iterator[None]:
    """Inside, the last ``drafted`` tokens of this thread's forward step through every recurrence,
    and each adds its states to ``kept``.  Other threads, which may run networks of the same kind
    meanwhile, are not concerned, but for their own drafts: these take turns."""
    owner = threading.get_ident()

    def exchanged(whole: Step, through: Step) -> Step:
        @wraps(whole)
        def rule(*args: Any, **more: Any) -> Any:
            return (through if threading.get_ident() == owner else whole)(*args, **more)

        return rule

    with _EXCHANGED:
        before = []
        try:
            for module, chunk, step, through in recurrences(hf):
                whole = getattr(module, chunk)
                before.append((module, chunk, whole))
                own = partial(through, whole, getattr(module, step), drafted, kept)
                setattr(module, chunk, exchanged(whole, own))
            yield
        finally:
            for module, chunk, whole in before:
                setattr(module, chunk, whole)


def _delta(
    chunk: Step, step: Step, drafted: int, kept: list[States], *args: torch.Tensor,
    initial_state: Any = None, g: torch.Tensor, beta: torch.Tensor, **more: Any,
) -> Any:  # fmt: skip
    """A gated delta rule over (B, T, ...): as plain decoding computes it, token by token."""
    given, total = [*args, g, beta], g.shape[1]
    head = total - drafted
    more |= {"output_final_state": True, "cu_seqlens": None}
    outs, states, state = [], [], initial_state
    for first, last in [(0, head), *((t, t + 1) for t in range(head, total))]:
        rule = step if state is not None and last - first == 1 else chunk
        *qkv, decay, rate = (x[:, first:last] for x in given)
        out, state = rule(*qkv, g=decay, beta=rate, initial_state=state, **more)
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
    for t in range(head if outs else 0, total):
        out = step(
            state, x[:, t], dt[:, t, :, None].expand(-1, -1, dim), wide, b[:, t], c[:, t],
            spread[0], z=None, dt_bias=spread[1], dt_softplus=dt_softplus,
        )  # fmt: skip
        outs.append(out[:, None].to(outs[0].dtype if outs else out.dtype))
        states.append(state.clone())
    kept.append(states)
    return torch.cat(outs, 1), state
