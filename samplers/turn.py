"""One step of one row, as the courses of its sampler make it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from ..core.canvas import BoolArray, Canvas, Edit, FloatArray, IntArray
from .base import (
    NO_SCORES,
    NOTHING,
    THE_ROW,
    Course,
    Decision,
    EosRule,
    Feed,
    Prediction,
    Reviser,
    Seen,
    Stop,
    Trial,
    Tried,
    View,
)


class Composed(Protocol):
    """What a turn asks of its `Sampler`, which makes the turns and so cannot be imported here."""

    @property
    def eos(self) -> EosRule: ...
    @property
    def stops(self) -> tuple[Stop, ...]: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    @property
    def ends(self) -> tuple[int, ...]: ...
    @property
    def reviser(self) -> Reviser | None: ...
    @property
    def courses(self) -> tuple[Course, ...]: ...
    @property
    def inner(self) -> Composed: ...
    def view(self, canvas: Canvas, prediction: Prediction) -> View: ...
    def select(
        self, view: View, force: bool = True
    ) -> tuple[BoolArray, IntArray, FloatArray, bool]: ...
    def decide(self, canvas: Canvas, feed: Feed, seen: list[Seen]) -> Decision: ...


class Turn:
    """The row, what was fed and seen, and what a step may do, each thing once and in this order:
    `keep`, `stopped`, `choose`, `commit`, `take_back` and `rewrite`, `end`.  What was left out when
    a later one is asked for is done as the selectors would.

    ``positions`` (n,) are the undecided ones of the window, of which ``chosen`` (n,) bool are
    committed, with ``tokens`` and ``logprobs``; ``committed`` those that are.
    """

    def __init__(self, sampler: Composed, canvas: Canvas, feed: Feed, seen: list[Seen]) -> None:
        self.sampler, self.canvas, self.feed, self.seen = sampler, canvas, feed, seen
        self.edits: tuple[Edit, ...] = ()
        self.probe = False
        self.open = False  # whether the window stays open although it is decided
        self.committed = NOTHING
        self.chosen: BoolArray
        self.tokens: IntArray
        self.logprobs: FloatArray
        self._prediction = seen[0].prediction
        self._kept: int | None = None
        self._view: View | None = None
        self._did: list[tuple[IntArray, IntArray, FloatArray]] = []
        self._remasked = self._padded = NOTHING
        self._stopped: bool | None = None
        self._forced = self._chose = self._committed = self._ended = False
        self._depth = 0

    # -- what is there --------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The row, what is predicted of its window, and the scores."""
        if self._view is None:
            self._view = self.sampler.view(self.canvas, self._prediction)
        return self._view

    @property
    def goes_on(self) -> bool:
        """Whether the text has not ended with this step."""
        return not (self._stopped or self.canvas.finished or self.canvas.stop_position is not None)

    # -- what a step may do ---------------------------------------------------------------------

    def go_on(self) -> None:
        """The step as the courses inside the present one make it, else as the selectors do."""
        courses, depth = self.sampler.courses, self._depth
        if depth < len(courses) and not self.canvas.finished:
            self._depth += 1
            courses[depth].decide(self)
            self._depth = depth
        self.end()

    def keep(self, branch: int) -> None:
        """Make a branch the row: its commits are final, its predictions those of the step."""
        trial, fork, canvas = self.feed.branches[branch], self.seen[branch].canvas, self.canvas
        self._kept, self._prediction = branch, self.seen[branch].prediction
        canvas.window, canvas.states = fork.window, fork.states
        canvas.block, canvas.block_step = fork.block, fork.block_step
        canvas.states[Tried] = Tried()
        if trial.positions.size:
            canvas.commit(trial.positions, trial.tokens, trial.logprobs)
            self.sampler.eos.check(canvas, trial.positions, self.sampler.stop_ids)

    def look_at(self, prediction: Prediction, score: FloatArray) -> View:
        """Decide on what another step has seen."""
        canvas, ends = self.canvas, self.sampler.ends
        self._view = View(canvas, prediction.of_window(canvas), score, prediction, ends)
        self._stopped = False
        return self._view

    def usual(self, canvas: Canvas, prediction: Prediction) -> None:
        """What the selectors make of a branch, on a canvas of its own."""
        self.sampler.inner.decide(canvas, THE_ROW, [Seen(canvas, prediction)])

    def stopped(self) -> bool:
        """Whether a part gives up refining: then all is committed as it is proposed."""
        if self._stopped is None:
            view = self.view
            self._stopped = any(stop.fill(view) for stop in self.sampler.stops)
            if self._stopped:
                p = view.all_predictions.take(self.canvas.masked[view.all_predictions.positions])
                self._write(p.positions, p.token, p.logprob)
                self.sampler.eos.check(self.canvas, p.positions, self.sampler.stop_ids)
                self._chose = self._committed = self._ended = True
                self.chosen = np.zeros(len(view.positions), np.bool_)
        return self._stopped

    def choose(self, force: bool = True) -> BoolArray:
        """What the selectors choose; ``force``: one at least."""
        if not self._chose and not self.stopped():
            self._chose = True
            chosen, self.tokens, self.logprobs, forced = self.sampler.select(self.view, force)
            self.chosen, self._forced = chosen, forced
        return self.chosen

    def force(self) -> None:
        """The progress guarantee: a step that was paid for decides something."""
        if len(self.chosen) and not self.chosen.any():
            self.chosen[self.view.score.argmax()] = True
            self._forced = True

    def choose_these(
        self, chosen: BoolArray, tokens: IntArray | None = None, logprobs: FloatArray | None = None
    ) -> None:
        """In place of what the selectors choose."""
        p = self.view.prediction
        self._chose, self.chosen = True, chosen
        self.tokens = p.token if tokens is None else tokens
        self.logprobs = p.logprob if logprobs is None else logprobs

    def commit(self) -> IntArray:
        """Commit what is chosen; the positions."""
        self.choose()
        if not self._committed:
            self._committed = True
            at = self.chosen.nonzero()[0]
            self.committed = self.view.positions[at]
            self.canvas.forced += self._forced
            self._write(self.committed, self.tokens[at], self.logprobs[at])
        return self.committed

    def take_back(self, positions: IntArray) -> None:
        """Decided positions return to undecided."""
        self.commit()
        self.canvas.remask(positions)
        self._remasked = positions

    def rewrite(self, positions: IntArray, tokens: IntArray, logprobs: FloatArray) -> None:
        """Decided positions get other tokens."""
        self.commit()
        self._write(positions, tokens, logprobs)

    def end(self) -> None:
        """Look whether the text has ended; nothing is decided afterwards."""
        if self._ended or self.probe or self.canvas.finished:
            return
        self.commit()
        if self._ended:  # a part gave up
            return
        self._ended, canvas, end = True, self.canvas, self.canvas.end
        if self.sampler.reviser is not None:
            # Until the window closes no text ends, and no other window opens.
            canvas.revising = self.open or bool(canvas.masks().size)
        self.sampler.eos.check(canvas, self._all()[0], self.sampler.stop_ids)
        if canvas.end < end:
            self._padded = np.arange(canvas.end, min(end, canvas.length))

    def try_next(self, branches: Iterable[BoolArray]) -> None:
        """Feed branches in the next forward, each with the proposals at (n,) bool of the view's
        positions."""
        self.canvas.states[Tried] = Tried(tuple(trial(self.view, one) for one in branches))

    # -- what it did ----------------------------------------------------------------------------

    def _write(self, positions: IntArray, tokens: IntArray, logprobs: FloatArray) -> None:
        self.canvas.commit(positions, tokens, logprobs)
        self._did.append((positions, tokens, logprobs))

    def _all(self) -> tuple[IntArray, IntArray, FloatArray]:
        if len(self._did) == 1:
            return self._did[0]
        if not self._did:
            return NOTHING, NOTHING, NO_SCORES
        positions, tokens, logprobs = zip(*self._did, strict=True)
        return np.concatenate(positions), np.concatenate(tokens), np.concatenate(logprobs)

    def decision(self) -> Decision:
        """What came of it."""
        positions, tokens, logprobs = self._all()
        return Decision(
            positions, self._remasked, self._forced, self._kept, 0, tokens, logprobs, self._padded,
            self.edits, self.probe,
        )  # fmt: skip


def trial(view: View, chosen: BoolArray) -> Trial:
    """The commits of a branch."""
    p = view.prediction
    return Trial(p.positions[chosen], p.token[chosen], p.logprob[chosen])
