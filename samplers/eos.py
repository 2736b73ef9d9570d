"""What a committed stop id does to the rest of a row.

| policy | rule |
|---|---|
| ``prefix_complete`` | stop when everything left of a stop id is decided; lossless (default) |
| ``none`` | decode everything; the text is cut at the first stop id afterwards |
| ``block_contains`` | stop when a finished block holds a stop id (LocalLeap, dInfer) |
| ``block_all`` | stop when a finished block is nothing but stop ids (FreeDave) |
| ``first_commit`` | a stop id ends the region at once, also over decided text; the padding behind
it goes on being fed (DCD, d3LLM) |
| ``first_commit_cut`` | the same without that padding (Window-Diffusion's early stop) |
| ``last_block`` | no block opens any more; those that are open are decided (D2F) |
| ``suppress`` | the end-of-text id is never proposed (LLaDA's ``logits_eos_inf``) |
| ``rank_last`` | stop ids are committed last (LLaDA's ``confidence_eos_eot_inf``, repaired) |

``suppress`` and ``rank_last`` end a row like ``prefix_complete``.  Unlike the official code, which
at temperature 0 removes both ids from the softmax after the argmax, ``rank_last`` keeps the clean
probability and only orders such positions behind all others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..core.canvas import BoolArray, Canvas, Edit, FloatArray, IntArray
from ..core.capabilities import FORESIGHT, KEEPS_TEXT, Capability
from ..core.limits import bounds, one_of
from .base import Ban, EosRule, View
from .compose import register

StopIds = tuple[int, ...]


@dataclass
class Prefix:
    """Up to where everything is decided and was searched for a stop id."""

    end: int = 0

    def moved(self, edit: Edit) -> None:
        self.end = min(self.end, edit.at)


def is_stop(tokens: IntArray, stop_ids: StopIds) -> BoolArray:
    """(n,) bool: which tokens end a text."""
    result = np.zeros(len(tokens), np.bool_)
    for stop in stop_ids:
        result |= tokens == stop
    return result


def stops(canvas: Canvas, low: int, high: int, stop_ids: StopIds) -> IntArray:
    """Positions in ``[low, high)`` where the text may end: given text to the right forbids it."""
    low = max(low, canvas.text_floor)
    return low + np.flatnonzero(is_stop(canvas.tokens[low:high], stop_ids))


def prefix_complete(canvas: Canvas, committed: IntArray, stop_ids: StopIds) -> None:
    """Stop as soon as a stop id has nothing undecided to its left."""
    prefix = canvas.state(Prefix)
    start = max(canvas.start, prefix.end)
    undecided = canvas.masked[start : canvas.end]
    ahead = int(undecided.argmax()) if undecided.size else 0
    frontier = start + ahead if undecided.size and undecided[ahead] else canvas.end
    if frontier == start:
        return
    prefix.end = frontier
    end_at(canvas, stops(canvas, start, frontier, stop_ids))


def end_at(canvas: Canvas, ends: IntArray) -> None:
    """The answer ends with the first of the stop ids at ``ends``, if any: pad the rest, finish."""
    if ends.size:
        canvas.stop_position = int(ends[0])
        canvas.cut(canvas.stop_position)
        canvas.finish("stop")


def block_contains(canvas: Canvas, committed: IntArray, stop_ids: StopIds) -> None:
    """Stop when the window is decided and holds a stop id."""
    low, high = canvas.window
    if not canvas.masked[low:high].any():
        end_at(canvas, stops(canvas, low, high, stop_ids))


def block_all(canvas: Canvas, committed: IntArray, stop_ids: StopIds) -> None:
    """Stop when the window is decided and is nothing but stop ids."""
    low, high = canvas.window
    if not canvas.masked[low:high].any() and is_stop(canvas.tokens[low:high], stop_ids).all():
        end_at(canvas, stops(canvas, canvas.start, high, stop_ids))


def first_commit(canvas: Canvas, committed: IntArray, stop_ids: StopIds, keep: bool = True) -> None:
    """The leftmost new stop id ends the region; the row goes on left of it."""
    result = committed[is_stop(canvas.tokens[committed], stop_ids)]
    result = result[result >= canvas.text_floor]
    if result.size:
        canvas.stop_position = int(result.min())
        canvas.cut(canvas.stop_position, keep)


def last_block(canvas: Canvas, committed: IntArray, stop_ids: StopIds) -> None:
    """A stop id ends the region behind the window, and the answer once that is decided."""
    result, high = stops(canvas, canvas.start, canvas.end, stop_ids), canvas.window[1]
    if result.size and canvas.text_floor <= high < canvas.end:
        canvas.cut(high - 1)
    if not canvas.masked[canvas.start : canvas.end].any():
        end_at(canvas, result)


CHECKS: dict[str, Callable[[Canvas, IntArray, StopIds], None]] = {
    "prefix_complete": prefix_complete, "none": lambda canvas, committed, stop_ids: None,
    "block_contains": block_contains, "block_all": block_all, "first_commit": first_commit,
    "first_commit_cut": partial(first_commit, keep=False), "last_block": last_block,
    "suppress": prefix_complete, "rank_last": prefix_complete,
}  # fmt: skip


@register("eos")
class Eos(EosRule):
    """What ends a text: one of the policies by name (default ``prefix_complete``)."""

    limits = bounds(eos_policy=one_of(CHECKS))

    eos_policy: str | None = None
    eos_token_id: int | None = None

    def __str__(self) -> str:
        return f"eos_policy={self.eos_policy!r}"

    @property
    def offers(self) -> frozenset[Capability]:  # type: ignore[override]
        if (self.eos_policy or "").startswith("first_commit"):  # it overwrites
            return frozenset({FORESIGHT})
        return frozenset({KEEPS_TEXT, *([] if self.eos_policy == "rank_last" else [FORESIGHT])})

    @property
    def bans(self) -> Mapping[int, Ban | None]:  # type: ignore[override]
        if self.eos_policy != "suppress" or self.eos_token_id is None:
            return {}
        return {self.eos_token_id: None}

    @property
    def ends(self) -> bool:  # type: ignore[override]
        return self.eos_policy != "none"

    def rescore(self, view: View) -> FloatArray:
        if self.eos_policy != "rank_last" or not view.stop_ids:
            return view.score
        late = is_stop(view.prediction.token, view.stop_ids)
        spread = np.ptp(view.score) + 1 if view.score.size else 0
        return np.where(late, view.score - spread, view.score).astype(np.float32)

    def check(self, canvas: Canvas, committed: IntArray, stop_ids: StopIds) -> None:
        if not canvas.revising:  # what may still change ends no text
            CHECKS[self.eos_policy or "prefix_complete"](canvas, committed, stop_ids)
