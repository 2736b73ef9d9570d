"""A complete sampler: the order in which one step asks its parts.

Parts and what they see are in `base`; how a string becomes a `Sampler` is in `compose`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..core.canvas import BoolArray, Canvas, FloatArray, IntArray
from ..core.capabilities import FIXED_WINDOW, JUDGED, SHADOW, Capability
from ..core.errors import ConfigError
from .base import (
    NOTHING,
    THE_ROW,
    Course,
    Decision,
    EosRule,
    Explorer,
    Feed,
    Length,
    Part,
    Prediction,
    Reviser,
    Scorer,
    Seen,
    Selector,
    Stop,
    Transform,
    View,
    Window,
)
from .turn import Turn


def checked(part: Window | Selector, view: View) -> BoolArray:
    """What a part selects; an error that names the part where that is no choice of positions."""
    chosen: object = part.select(view)
    n = len(view.score)
    if isinstance(chosen, np.ndarray) and chosen.dtype == np.bool_ and chosen.shape == (n,):
        return chosen
    if isinstance(chosen, np.ndarray):
        got = f"an array of {chosen.dtype}, shape {chosen.shape}"
    else:
        got = "None" if chosen is None else f"a {type(chosen).__name__}"
    raise ConfigError(
        f"{part.name or type(part).__name__}.select returned {got}, not one bool per position of "
        f"the view, shape ({n},); for indices: chosen = np.zeros({n}, bool); chosen[indices] = True"
    )


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
    transforms: tuple[Transform, ...] = ()
    reviser: Reviser | None = None
    explorer: Explorer | None = None
    length: Length | None = None
    stop_ids: tuple[int, ...] = ()

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        single = (self.reviser, self.explorer, self.length)
        return (
            self.window, *self.transforms, self.scorer, *self.selectors, self.eos, *self.stops,
            *(part for part in single if part is not None),
        )  # fmt: skip

    @cached_property
    def statistics(self) -> frozenset[str]:
        """Fields of `Prediction` that some part reads."""
        return frozenset().union(*(part.statistics for part in self.parts))

    @cached_property
    def _overriding(self) -> dict[str, tuple[Part, ...]]:
        """The parts that do something in a method that does nothing by default."""
        return {
            name: tuple(p for p in self.parts if getattr(type(p), name) is not getattr(Part, name))
            for name in ("begin_block", "wants", "asks", "heat")
        }

    @cached_property
    def plain(self) -> bool:
        """Whether a step reads the window's masks alone and feeds the row as it stands."""
        looks = self._overriding["wants"] or self._overriding["asks"]
        return not (looks or self.explorer or self.reviser or self.length or self.bannable)

    @cached_property
    def reads_more(self) -> bool:
        """Whether predictions may be of other positions than the window's masks."""
        return bool(self._overriding["wants"]) or self.settles or self.explorer is not None

    @cached_property
    def stays(self) -> bool:
        """Whether the window stays while something in it is undecided."""
        return FIXED_WINDOW in self.window.offers

    @cached_property
    def settles(self) -> bool:
        """Whether the window changes by what is predicted."""
        return type(self.window).settle is not Window.settle

    @cached_property
    def resting(self) -> tuple[Selector, ...]:
        """The selectors, where all of them keep a schedule that may grant a step nothing."""
        keep = all(type(s).rests is not Selector.rests for s in self.selectors)
        return self.selectors if keep else ()

    @cached_property
    def courses(self) -> tuple[Course, ...]:
        """The parts that say how a step goes, the outermost first."""
        return tuple(p for p in (self.length, self.explorer, self.reviser) if p is not None)

    def feeds(self, canvas: Canvas) -> Feed:
        """What the next forward feeds of the row."""
        result = THE_ROW
        for course in self.courses:
            own = course.feeds(canvas)
            if own is not THE_ROW:
                result = own if result is THE_ROW else replace(
                    result, masks=result.masks if result.masks.size else own.masks
                )  # fmt: skip
        return result

    def prepare(self, canvas: Canvas) -> bool:
        """Move the window; False when the schedule grants this step nothing."""
        block = canvas.block
        if not canvas.revising and np.count_nonzero(canvas.masked[canvas.start : canvas.end]):
            self.window.advance(canvas)
        if canvas.block != block:
            for part in self._overriding["begin_block"]:
                part.begin_block(canvas)
        if self.window.decides(canvas) or not all(s.rests(canvas) for s in self.selectors):
            return True
        return canvas.revising and not canvas.masks().size

    def targets(self, canvas: Canvas) -> IntArray:
        """Positions whose predictions this step needs, ascending."""
        masks, parts = canvas.masks(), self._overriding["wants"]
        wanted = [w for part in parts if (w := part.wants(canvas)) is not None]
        return np.unique(np.concatenate([masks, *wanted])) if wanted else masks

    def heat(self, canvas: Canvas) -> float | None:
        """The temperature that this step reads at, where a part has one of its own."""
        for part in self._overriding["heat"]:
            return part.heat(canvas)
        return None

    @cached_property
    def shadows(self) -> bool:
        """Whether some forwards feed shadow tokens."""
        return any(part.needs & {JUDGED, SHADOW} for part in self.parts)

    def asks(self, canvas: Canvas, positions: IntArray) -> dict[str, IntArray]:
        """Part name -> (n, m) ids whose log-probabilities it reads at ``positions``."""
        parts = self._overriding["asks"]
        result = {part.name: part.asks(canvas, positions) for part in parts}
        return {name: ids for name, ids in result.items() if ids is not None}

    @cached_property
    def bannable(self) -> frozenset[int]:
        """Ids that some part forbids in some steps, and reads where they are proposed."""
        return frozenset().union(*(part.bannable for part in self.parts))

    def bans(self, canvas: Canvas, positions: IntArray, ids: Sequence[int]) -> BoolArray:
        """(n, m) bool: which of the ``ids`` may not be proposed at which of the ``positions``."""
        result = np.zeros((len(positions), len(ids)), np.bool_)
        for part in self.parts:
            for token, where in part.bans(canvas, positions).items():
                result[:, ids.index(token)] |= where
        return result

    def maps(self, layers: int) -> tuple[int, ...]:
        """Decoder layers whose attention some part reads, ascending."""
        return tuple(sorted({i for part in self.parts for i in part.maps(layers)}))

    @cached_property
    def inner(self) -> Sampler:
        """The same without its explorer."""
        return replace(self, explorer=None)

    @property
    def offers(self) -> frozenset[Capability]:
        """What it offers to a cache: foresight, when no part looks at predictions; a fixed
        window."""
        looks = (
            self.stops
            or self.reviser
            or self.explorer
            or self.transforms
            or self._overriding["wants"]
        )
        blind = () if looks or self.eos.reorders else (self.scorer, *self.selectors)
        result = frozenset.intersection(*(p.offers for p in blind)) if blind else frozenset()
        return result | self.window.offers

    def foreseen(self, canvas: Canvas) -> IntArray:
        """The positions that this step is going to commit, ascending; only with foresight.  For
        `dkv_greedy`, which computes their neighbourhood in the same forward."""
        positions = canvas.masks()
        blank = Prediction(
            positions, np.zeros_like(positions), np.zeros(len(positions), np.float32)
        )
        score = self.scorer.score(canvas, blank)
        chosen, *_ = self.select(View(canvas, blank, score, blank, self.stop_ids))
        return positions[chosen]

    def decide(self, canvas: Canvas, feed: Feed, seen: list[Seen]) -> Decision:
        """Make a step of one row, given what was fed and seen."""
        if self.courses:
            turn = Turn(self, canvas, feed, seen)
            turn.go_on()
            return turn.decision()
        view = self.view(canvas, seen[0].prediction)
        for stop in self.stops:
            if stop.fill(view):
                return self._fill(view)
        chosen, tokens, logprobs, forced = self.select(view)
        if self.window.reconsiders(view, chosen):
            return Decision(NOTHING, NOTHING)
        at = chosen.nonzero()[0]
        positions, ids, logprobs = view.prediction.positions[at], tokens[at], logprobs[at]
        canvas.forced += forced
        canvas.commit(positions, ids, logprobs)
        end, padded = canvas.end, NOTHING
        self.eos.check(canvas, positions, self.stop_ids)
        if canvas.end < end:
            padded = np.arange(canvas.end, min(end, canvas.length))
        return Decision(positions, NOTHING, forced, None, 0, ids, logprobs, padded)

    def view(self, canvas: Canvas, prediction: Prediction) -> View:
        """What the parts see of a step."""
        if self.settles:
            self.window.settle(canvas, prediction)
        for transform in self.transforms:
            prediction = transform.apply(canvas, prediction)
        here = prediction.of_window(canvas) if self.reads_more else prediction
        score = self.scorer.score(canvas, here)
        view = View(canvas, here, score, prediction, self.ends)
        rescored = self.eos.rescore(view)
        return view if rescored is score else replace(view, score=rescored)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a text, none where nothing does."""
        return self.stop_ids if self.eos.ends else ()

    def _fill(self, view: View) -> Decision:
        """Commit all that is undecided with its proposal."""
        p = view.all_predictions.take(view.canvas.masked[view.all_predictions.positions])
        view.canvas.commit(p.positions, p.token, p.logprob)
        self.eos.check(view.canvas, p.positions, self.stop_ids)
        return Decision(p.positions, NOTHING, tokens=p.token, logprobs=p.logprob)

    def select(
        self, view: View, force: bool = True
    ) -> tuple[BoolArray, IntArray, FloatArray, bool]:
        """What is committed, (n,) bool, with which ids and log-probabilities, (n,), and whether
        it had to be forced."""
        p = view.prediction
        if not len(p.positions):  # a decided window that a reviser holds open
            return np.zeros(0, np.bool_), p.token, p.logprob, False
        if self.window.decides(view.canvas):
            return checked(self.window, view), p.token, p.logprob, False
        chosen = checked(self.selectors[0], view)
        tokens, logprobs = self.selectors[0].proposals(view, chosen)
        forced = False
        for selector in self.selectors[1:]:
            if selector.extends:
                forced |= force and self._force(view, chosen)
            left = (~chosen).nonzero()[0]
            rest = view.take(left)
            more = checked(selector, rest)
            chosen[left] = more
            own, sure = selector.proposals(rest, more)
            if own is not rest.prediction.token:
                tokens, logprobs = tokens.copy(), logprobs.copy()
                tokens[left[more]], logprobs[left[more]] = own[more], sure[more]
        return chosen, tokens, logprobs, forced | (force and self._force(view, chosen))

    def _force(self, view: View, chosen: BoolArray) -> bool:
        """The progress guarantee: a step that was paid for decides something."""
        if not len(chosen) or np.count_nonzero(chosen):
            return False
        chosen[view.score.argmax()] = True
        return True
