"""What a sampler is made of.

A sampler answers five questions about one row: *where* may positions be committed (a `Window`),
*how sure* is the model (a `Scorer`), *which* positions now (`Selector`s, a chain), *when to stop*
(`Stop`s), *what to take back* (a `Reviser`).  Each answer is a `Part`: a small frozen dataclass
with the paper's parameter names.  Parts are NumPy on one row; they never see a batch or a device.

Parts state what they need of one another as `Capability` objects; `compose` refuses a combination
whose needs nobody meets, with a sentence that names both sides and a way out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..canvas import BoolArray, Canvas, FloatArray, IntArray
from ..capabilities import Capability


@dataclass(frozen=True)
class Prediction:
    """What the model says about the positions a row asked for.

    All arrays have the length of ``positions`` (ascending int64).  ``token`` is the proposal x0,
    ``logprob`` its log-probability; ``margin`` p1 - p2, ``gap`` top logit minus second logit,
    ``entropy`` in nats, ``top_token`` / ``top_logprob`` (n, k): present when a part's
    ``statistics`` ask for them.
    """

    positions: IntArray
    token: IntArray
    logprob: FloatArray
    margin: FloatArray | None = None
    gap: FloatArray | None = None
    entropy: FloatArray | None = None
    top_token: IntArray | None = None
    top_logprob: FloatArray | None = None

    def take(self, keep: BoolArray | IntArray) -> Prediction:
        """The same for a subset of the positions."""

        def pick(array: Any) -> Any:
            return None if array is None else array[keep]

        return Prediction(
            self.positions[keep], self.token[keep], self.logprob[keep], pick(self.margin),
            pick(self.gap), pick(self.entropy), pick(self.top_token), pick(self.top_logprob),
        )  # fmt: skip


@dataclass(frozen=True)
class View:
    """What a part sees: the row, predictions for its undecided window positions, their scores.

    ``score`` (n,) float32: larger means commit earlier.  ``stop_ids`` are the ids that end a text.
    """

    canvas: Canvas
    prediction: Prediction
    score: FloatArray
    stop_ids: tuple[int, ...] = ()

    @property
    def positions(self) -> IntArray:
        return self.prediction.positions

    def take(self, keep: BoolArray) -> View:
        return View(self.canvas, self.prediction.take(keep), self.score[keep], self.stop_ids)


@dataclass(frozen=True)
class Part:
    """A piece of a sampler.  Class attributes describe it to `compose` and to `available`."""

    name: ClassVar[str] = ""
    role: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    arxiv: ClassVar[str] = ""
    needs: ClassVar[frozenset[Capability]] = frozenset()
    offers: ClassVar[frozenset[Capability]] = frozenset()
    statistics: ClassVar[frozenset[str]] = frozenset()  # fields of Prediction it reads

    def companions(self) -> tuple[Part, ...]:
        """Parts that complete the paper's method where a composition leaves a role open."""
        return ()


class Window(Part):
    """Where the step may commit."""

    role: ClassVar[str] = "window"

    def advance(self, canvas: Canvas) -> None:
        """Before a forward: make sure the window holds an undecided position, if any is left."""
        raise NotImplementedError

    def decides(self, canvas: Canvas) -> bool:
        """Whether the window itself says what this step commits, in place of the selectors."""
        return False

    def select(self, view: View) -> BoolArray:
        """(n,) bool over ``view.positions``, in a step that the window `decides`."""
        raise NotImplementedError


class Scorer(Part):
    """How sure the model is: larger commits earlier."""

    role: ClassVar[str] = "scorer"

    def score(self, canvas: Canvas, prediction: Prediction) -> FloatArray:
        raise NotImplementedError


class Selector(Part):
    """Which positions of the view are committed now."""

    role: ClassVar[str] = "selector"

    def rests(self, canvas: Canvas) -> bool:
        """Whether the schedule grants this step nothing, so that no forward is needed."""
        return False

    def select(self, view: View) -> BoolArray:
        """(n,) bool over ``view.positions``."""
        raise NotImplementedError


class Stop(Part):
    """When to give up refining."""

    role: ClassVar[str] = "stop"

    def fill(self, view: View) -> bool:
        """Before the step's own commits: commit all that is undecided with its proposal, finish?"""
        raise NotImplementedError


class EosRule(Part):
    """What a stop id does to the rest of the row."""

    role: ClassVar[str] = "eos"
    suppress: ClassVar[bool] = False  # whether the end-of-text id may be proposed at all

    @property
    def reorders(self) -> bool:
        """Whether `rescore` does anything."""
        return False

    def rescore(self, view: View) -> FloatArray:
        """Scores after the rule had its say."""
        return view.score

    def check(self, canvas: Canvas, committed: IntArray, stop_ids: tuple[int, ...]) -> None:
        """After the commits: cut the row or finish it when its text has ended."""
        raise NotImplementedError


class Reviser(Part):
    """What to take back."""

    role: ClassVar[str] = "reviser"

    def revise(self, view: View, committed: IntArray) -> IntArray:
        """Positions to return to undecided."""
        raise NotImplementedError


def top(score: FloatArray, n: int) -> BoolArray:
    """The ``n`` largest scores as (len(score),) bool; ties go to the lowest index."""
    chosen = np.zeros(len(score), np.bool_)
    if n >= len(score):
        chosen[:] = True
    elif n == 1:
        chosen[score.argmax()] = True
    elif n > 1:
        chosen[np.argsort(-score, kind="stable")[:n]] = True
    return chosen


def even_quota(items: int, steps: int) -> IntArray:
    """``items`` over ``steps`` as evenly as possible, the larger shares first."""
    base, rest = divmod(items, steps)
    return base + (np.arange(steps) < rest).astype(np.int64)


@dataclass(frozen=True)
class Decision:
    """What one step did to one row."""

    committed: IntArray
    remasked: IntArray
    forced: bool = False


@dataclass(frozen=True)
class Sampler:
    """A complete composition.  Built by `compose`, asked by the engine, once per row and step.

    ``spec`` is the string it came from; ``stop_ids`` are the ids that end a text.
    """

    spec: str
    window: Window
    scorer: Scorer
    selectors: tuple[Selector, ...]
    eos: EosRule
    stops: tuple[Stop, ...] = ()
    reviser: Reviser | None = None
    stop_ids: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        revisers = (self.reviser,) if self.reviser else ()
        return (self.window, self.scorer, *self.selectors, self.eos, *self.stops, *revisers)

    @property
    def statistics(self) -> frozenset[str]:
        """Fields of `Prediction` that some part reads."""
        return frozenset().union(*(part.statistics for part in self.parts))

    def prepare(self, canvas: Canvas) -> bool:
        """Move the window; False when the schedule grants this step nothing."""
        self.window.advance(canvas)
        # Every selector is asked, so that each sets up its schedule when a window opens.
        active = [not selector.rests(canvas) for selector in self.selectors]
        return any(active) or self.window.decides(canvas)

    def targets(self, canvas: Canvas) -> IntArray:
        """Positions whose predictions this step needs, ascending."""
        return canvas.masks()

    @property
    def offers(self) -> frozenset[Capability]:
        """What it offers to a cache: foresight, when no part looks at predictions."""
        blind = (self.scorer, *self.selectors)
        looks = self.stops or self.reviser or self.eos.reorders
        return frozenset.intersection(*(p.offers for p in blind)) if not looks else frozenset()

    def foreseen(self, canvas: Canvas) -> IntArray:
        """The positions that this step is going to commit, ascending; only with foresight."""
        positions = canvas.masks()
        blank = Prediction(
            positions, np.zeros_like(positions), np.zeros(len(positions), np.float32)
        )
        view = View(canvas, blank, self.scorer.score(canvas, blank), self.stop_ids)
        chosen = self._select(view)
        if not chosen.any():
            chosen[view.score.argmax()] = True
        return positions[chosen]

    def decide(self, canvas: Canvas, prediction: Prediction) -> Decision:
        """Commit, revise and stop on one row, given predictions for `targets`."""
        view = View(canvas, prediction, self.scorer.score(canvas, prediction), self.stop_ids)
        view = replace(view, score=self.eos.rescore(view))
        if any(stop.fill(view) for stop in self.stops):
            self._commit(view, np.ones(len(view.positions), np.bool_))
            self.eos.check(canvas, view.positions, self.stop_ids)
            return Decision(view.positions, view.positions[:0])
        chosen = self._select(view)
        forced = not chosen.any() and len(chosen) > 0
        if forced:  # the progress guarantee: a step that was paid for decides something
            chosen[view.score.argmax()] = True
            canvas.forced += 1
        committed = self._commit(view, chosen)
        remasked = committed[:0]
        if self.reviser is not None:
            canvas.memory["revises"] = True  # end-of-text rules wait for the window to close
            remasked = self.reviser.revise(view, committed)
            canvas.remask(remasked)
        self.eos.check(canvas, committed, self.stop_ids)
        return Decision(committed, remasked, forced)

    def _select(self, view: View) -> BoolArray:
        if self.window.decides(view.canvas):
            return self.window.select(view)
        chosen = self.selectors[0].select(view)
        for selector in self.selectors[1:]:
            left = ~chosen
            chosen[left] = selector.select(view.take(left))
        return chosen

    def _commit(self, view: View, chosen: BoolArray) -> IntArray:
        p = view.prediction
        positions = p.positions[chosen]
        view.canvas.commit(positions, p.token[chosen], p.logprob[chosen])
        return positions
