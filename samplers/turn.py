"""One step of one row where it does not simply predict, choose, commit and look for an end."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from ..core.canvas import BoolArray, Canvas, Edit, FloatArray, IntArray
from .base import NO_SCORES, NOTHING, Part, Prediction, Selection, View, forced

INITIAL = 64  # positions of an answer whose length is found, to begin with
NESTED = ("length", "explorer", "reviser")  # courses that stand inside one another in this order


@dataclass(frozen=True)
class Trial:
    """Commits that one branch makes beyond its row."""

    positions: IntArray
    tokens: IntArray
    logprobs: FloatArray


@dataclass(slots=True, eq=False)
class Decision:
    """What one step did to one row: ``committed`` positions with their ``tokens`` and
    ``logprobs``, those whose token a reviser replaced among them; ``remasked`` positions;
    ``padded``: positions that became padding behind an end of text and stay in the row;
    ``forced``: whether only the progress guarantee committed; ``kept``: the branch that has become
    the row; ``explored``: branches that were fed in this step beyond the one kept;
    ``edits``: changes of the row's length, which follow all this, in turn; ``probe``: whether the
    step only looked for the length, and was none of the schedule's."""

    committed: IntArray
    remasked: IntArray
    forced: bool = False
    kept: int | None = None
    explored: int = 0
    tokens: IntArray = field(default_factory=lambda: NOTHING)
    logprobs: FloatArray = field(default_factory=lambda: NO_SCORES)
    padded: IntArray = field(default_factory=lambda: NOTHING)
    edits: tuple[Edit, ...] = ()
    probe: bool = False

    def after(self, trial: Trial | None, explored: int) -> "Decision":
        """The same with the trial that came before it."""
        if trial is None:
            return replace(self, explored=explored)
        return replace(
            self, committed=np.concatenate([trial.positions, self.committed]),
            tokens=np.concatenate([trial.tokens, self.tokens]),
            logprobs=np.concatenate([trial.logprobs, self.logprobs]), explored=explored,
        )  # fmt: skip

    @property
    def bits(self) -> float:
        """Information committed in this step: sum of -log2 p (2511.21103)."""
        return float(-self.logprobs.sum() / np.log(2))


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """What ascending ``positions`` (n,) are fed as in place of one token: ``tokens`` (n, k) and
    their ``weights``, with the mask's embedding for the rest."""

    positions: IntArray
    tokens: IntArray
    weights: FloatArray


@dataclass(frozen=True, slots=True)
class Feed:
    """What the next forward feeds of a row.

    ``branches``: in place of the row as it stands, texts with these commits beyond it, each in a
    lane of its own; none: the row itself.  ``masks``: positions that are fed once more, as [MASK]s
    that see every token but the one in their place.  ``ordered``: positions, from the first on and
    below the second, that see only what is left of them, as if blocks had one position.  ``soft``:
    whether a network with self-conditioning is given next what this forward predicts.
    ``mixture``: positions that are fed as several tokens."""

    branches: tuple[Trial, ...] = ()
    masks: IntArray = field(default_factory=lambda: NOTHING)
    ordered: tuple[int, int] = (0, 0)
    soft: bool = True
    mixture: Mixture | None = None


THE_ROW = Feed()


@dataclass(slots=True, eq=False)
class Seen:
    """What the model says of the row, or of one branch: ``prediction`` of what was asked for,
    ``masks`` of those fed once more; ``canvas`` is the text that was fed."""

    canvas: Canvas
    prediction: Prediction
    masks: Prediction | None = None


class Course(Part, role="course"):
    """How a step goes, where it is not: choose, commit, look for an end.

    Two questions: what the next forward `feeds` beyond the row as it stands, and how to `decide`
    once that has been seen.  The second is ordinary code over a `Turn`, which has the row, what was
    seen, and a method for each thing that a step may do.  Courses stand inside one another: a rule
    of length around an explorer around a reviser.  A course that is none of these only chooses: it
    stands around the selectors and around the courses that were named before it.
    """

    @property
    def width(self) -> int:
        """Most branches it feeds at once."""
        return 1

    def feeds(self, canvas: Canvas) -> Feed:
        """What the next forward feeds; it only reads."""
        return THE_ROW

    def decide(self, turn: "Turn") -> None:
        """Make the step; ``turn.go_on()`` does what it is without this course."""
        raise NotImplementedError


class Reviser(Course, role="reviser"):
    """What is taken back, or written differently, once a step has committed.

    One that only takes back offers `CONSTRAINED`: what is written then stays in a format.
    """


@dataclass
class Tried:
    """The branches that the next forward feeds."""

    trials: tuple[Trial, ...] = ()


class Explorer(Course, role="explorer"):
    """What is tried first: continuations of a row, fed in one forward (`Turn.try_next`)."""

    def feeds(self, canvas: Canvas) -> Feed:
        trials = canvas.state(Tried).trials
        return Feed(trials) if trials else THE_ROW


class Length(Course, role="length"):
    """How long the answer is, where that is found while it is written.

    The region begins with `open` positions and never gets more than ``canvas.cap``.  Before the
    first step may come probes: turns that decide nothing.  After a step `resize` names the edits
    of the row; nobody else changes its length.  Positions left of an edit stay where they are.
    """

    # What it changes: the "end" of the region, "blocks" that are open, too, the places of decided
    # "text", or also the length of "holes" in a text.
    edits: ClassVar[str] = "blocks"

    def open(self, start: int, origin: int, cap: int) -> int:
        """Positions of the region to begin with, which starts at ``start``; blocks are counted
        from ``origin`` on.  By default its field ``initial``, else 64."""
        return getattr(self, "initial", None) or min(cap, INITIAL)

    def decide(self, turn: "Turn") -> None:
        turn.go_on()
        if turn.goes_on and turn.canvas.stop_position is None:
            turn.edits = self.resize(turn.view, turn.committed)

    def resize(self, view: View, committed: IntArray) -> tuple[Edit, ...]:
        """What follows from a step; ``view`` is from before its commits, but for the row."""
        raise NotImplementedError


class Turn:
    """The row, what was fed and seen, and what a step may do, each thing once and in this order:
    `keep`, `stopped`, `choose`, `commit`, `take_back` and `rewrite`, `end`.  What was left out when
    a later one is asked for is done as the courses inside the present one and the selectors would.

    ``positions`` (n,) are the undecided ones of the window, of which ``chosen`` (n,) bool are
    committed, with ``tokens`` and ``logprobs``; ``committed`` those that are.
    """

    def __init__(
        self, selection: Selection, courses: Sequence[Course], canvas: Canvas, feed: Feed,
        seen: list[Seen],
    ) -> None:  # fmt: skip
        self.selection, self.canvas, self.feed, self.seen = selection, canvas, feed, seen
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
        self._force = True  # whether something has to be chosen
        self._courses = courses
        # Those that say where a step goes, the next one last, and those that only choose.
        self._nested = [one for one in reversed(courses) if type(one).role in NESTED]
        self._choosers = [one for one in courses if type(one).role not in NESTED]

    # -- what is there --------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The row, what is predicted of its window, and the scores."""
        if self._view is None:
            self._view = self.selection.view(self.canvas, self._prediction)
        return self._view

    @property
    def goes_on(self) -> bool:
        """Whether something is left to decide after this step."""
        return not (self._stopped or self.canvas.finished)

    # -- what a step may do ---------------------------------------------------------------------

    def go_on(self) -> None:
        """The step as the courses inside the present one make it, else as the selectors do."""
        if self._nested and not self.canvas.finished:
            self._nested.pop().decide(self)
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
            self._look_for_end(trial.positions)

    def look_at(self, prediction: Prediction, score: FloatArray) -> View:
        """Decide on what another step has seen."""
        canvas, ends = self.canvas, self.selection.ends
        self._view = View(canvas, prediction.of_window(canvas), score, prediction, ends)
        self._stopped = False
        return self._view

    def usual(self, canvas: Canvas, prediction: Prediction) -> None:
        """What the selectors make of a branch, on a canvas of its own."""
        inner = [one for one in self._courses if not isinstance(one, Explorer)]
        Turn(self.selection, inner, canvas, THE_ROW, [Seen(canvas, prediction)]).go_on()

    def stopped(self) -> bool:
        """Whether a part gives up refining: then all is committed as it is proposed."""
        if self._stopped is None:
            view = self.view
            self._stopped = any(stop.fill(view) for stop in self.selection.stops)
            if self._stopped:
                p = view.all_predictions.take(self.canvas.masked[view.all_predictions.positions])
                self._write(p.positions, p.token, p.logprob)
                self._look_for_end(p.positions)
                self._chose = self._committed = self._ended = True
                self.chosen = np.zeros(len(view.positions), np.bool_)
        return self._stopped

    def choose(self, force: bool = True) -> BoolArray:
        """What the selectors choose; ``force``: one at least."""
        if not self._chose and not self.stopped():
            self._force &= force
            if self._choosers:
                self._choosers.pop().decide(self)
            if not self._chose:
                chosen, self._forced = self.selection.choose(self.view, self._force)
                self.choose_these(chosen)
        return self.chosen

    def force(self) -> None:
        """The progress guarantee: a step that was paid for decides something."""
        self._forced |= forced(self.view, self.chosen)

    def choose_these(
        self, chosen: BoolArray, tokens: IntArray | None = None, logprobs: FloatArray | None = None
    ) -> None:
        """In place of what the selectors choose."""
        p = self.view.prediction
        self._chose, self.chosen = True, chosen
        self.tokens = p.token if tokens is None else tokens
        self.logprobs = p.logprob if logprobs is None else logprobs
        self._forced &= bool(chosen.any())

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
        if any(isinstance(course, Reviser) for course in self._courses):
            # Until the window closes no text ends, and no other window opens.
            canvas.revising = self.open or bool(canvas.masks().size)
        self._look_for_end(self._all()[0])
        if canvas.end < end:
            self._padded = np.arange(canvas.end, min(end, canvas.length))

    def try_next(self, branches: Iterable[BoolArray]) -> None:
        """Feed branches in the next forward, each with the proposals at (n,) bool of the view's
        positions."""
        self.canvas.states[Tried] = Tried(tuple(trial(self.view, one) for one in branches))

    # -- what it did ----------------------------------------------------------------------------

    def _look_for_end(self, positions: IntArray) -> None:
        self.selection.eos.check(self.canvas, positions, self.selection.stop_ids)

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
