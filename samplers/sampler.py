"""A complete sampler: the order in which one step asks its parts.

Parts, what they see and what the selectors make of a step are in `base`, steps that go another way
in `turn`; how a string becomes a `Sampler` is in `compose`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..core.canvas import Canvas, IntArray
from ..core.capabilities import BLOCK_CAUSAL, FIXED_WINDOW, Capability
from .base import NOTHING, Ban, Part, Prediction, Selection, Selector, View
from .turn import THE_ROW, Course, Decision, Explorer, Feed, Length, Reviser, Seen, Turn


@dataclass(frozen=True, kw_only=True)
class Sampler(Selection):
    """A complete composition.  Built by `compose`, asked by the engine, once per row and step.

    ``spec`` is the string it came from.
    """

    spec: str
    length: Length | None = None
    explorer: Explorer | None = None
    reviser: Reviser | None = None
    choosers: tuple[Course, ...] = ()

    @cached_property
    def courses(self) -> tuple[Course, ...]:
        """The parts that say how a step goes, the outermost first; then those that only choose,
        the innermost first."""
        ways = (self.length, self.explorer, self.reviser)
        return (*(part for part in ways if part is not None), *self.choosers)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return (
            self.window, *self.transforms, self.scorer, *self.selectors, self.eos, *self.stops,
            *self.courses,
        )  # fmt: skip

    @cached_property
    def statistics(self) -> Mapping[str, int]:
        """Fields of `Prediction` that some part reads, and how much of them."""
        result: dict[str, int] = {}
        for part in self.parts:
            for name, amount in part.statistics.items():
                result[name] = max(amount, result.get(name, 0))
        return result

    @cached_property
    def beginners(self) -> tuple[Part, ...]:
        """The parts that set something up with a block."""
        return self._overriding("begin_block")

    @cached_property
    def readers(self) -> tuple[Part, ...]:
        """The parts that read more than the window's masks."""
        return self._overriding("reads")

    @cached_property
    def drawers(self) -> tuple[Part, ...]:
        """The parts that say how a step reads and draws."""
        return self._overriding("draws")

    def _overriding(self, name: str) -> tuple[Part, ...]:
        return tuple(p for p in self.parts if getattr(type(p), name) is not getattr(Part, name))

    @cached_property
    def plain(self) -> bool:
        """Whether a step reads the window's masks alone and feeds the row as it stands."""
        return not (self.readers or self.courses or self.conditional)

    @cached_property
    def reads_more(self) -> bool:
        return bool(self.readers) or self.settles or self.explorer is not None

    @cached_property
    def stays(self) -> bool:
        """Whether the window stays while something in it is undecided."""
        return FIXED_WINDOW in self.window.offers

    @cached_property
    def resting(self) -> tuple[Selector, ...]:
        """The selectors, where all of them keep a schedule that may grant a step nothing."""
        keep = all(type(s).rests is not Selector.rests for s in self.selectors)
        return self.selectors if keep else ()

    def feeds(self, canvas: Canvas) -> Feed:
        """What the next forward feeds of the row."""
        for course in self.courses:
            own = course.feeds(canvas)
            if own is not THE_ROW:
                return own
        return THE_ROW

    @cached_property
    def feeds_masks(self) -> bool:
        """Whether some forwards feed masks once more."""
        return any(BLOCK_CAUSAL in part.needs for part in self.parts)

    def prepare(self, canvas: Canvas) -> bool:
        """Move the window; False when the schedule grants this step nothing."""
        block = canvas.block
        if not canvas.revising and np.count_nonzero(canvas.masked[canvas.start : canvas.end]):
            self.window.advance(canvas)
        if canvas.block != block:
            for part in self.beginners:
                part.begin_block(canvas)
        if any(not selector.rests(canvas) for selector in self.resting):
            return True
        return not self.resting or (canvas.revising and not canvas.masks().size)

    def reads(self, canvas: Canvas) -> tuple[IntArray, dict[str, IntArray]]:
        """Positions whose predictions this step needs, ascending, and the ids (N, m) whose
        log-probabilities parts read, by the parts' names."""
        masks, ids, wanted = canvas.masks(), dict[str, IntArray](), list[IntArray]()
        for part in self.readers:
            own = part.reads(canvas)
            if own.positions is not None:
                wanted.append(own.positions)
            if own.ids is not None:
                ids[part.name] = own.ids
        return np.unique(np.concatenate([masks, *wanted])) if wanted else masks, ids

    @cached_property
    def conditional(self) -> Mapping[int, tuple[Ban, ...]]:
        """Id -> where some part forbids it in some steps, and reads where it is proposed."""
        result: dict[int, tuple[Ban, ...]] = {}
        for part in self.parts:
            for token, where in part.bans.items():
                if where is not None:
                    result[token] = (*result.get(token, ()), where)
        return result

    @property
    def offers(self) -> frozenset[Capability]:
        """What it offers to a cache: foresight if no part looks at predictions; a fixed window."""
        goes = self.explorer or self.reviser or self.choosers
        looks = goes or self.stops or self.transforms or self.readers
        blind = () if looks else (self.scorer, *self.selectors, self.eos)
        result = frozenset.intersection(*(p.offers for p in blind)) if blind else frozenset()
        return result | self.window.offers

    def foreseen(self, canvas: Canvas) -> IntArray:
        """The positions that this step is going to commit, ascending; only with foresight.  For
        caches that compute their neighbourhood in the same forward."""
        positions = canvas.masks()
        blank = Prediction(
            positions, np.zeros_like(positions), np.zeros(len(positions), np.float32)
        )
        score = self.scorer.score(canvas, blank)
        chosen, _ = self.choose(View(canvas, blank, score, blank, self.stop_ids))
        return positions[chosen]

    def decide(self, canvas: Canvas, feed: Feed, seen: list[Seen]) -> Decision:
        """Make a step of one row, given what was fed and seen."""
        if self.courses or self.stops:
            turn = Turn(self, self.courses, canvas, feed, seen)
            turn.go_on()
            return turn.decision()
        view = self.view(canvas, seen[0].prediction)
        p = view.prediction
        chosen, forced = self.choose(view)
        at = chosen.nonzero()[0]
        positions, ids, logprobs = p.positions[at], p.token[at], p.logprob[at]
        canvas.forced += forced
        canvas.commit(positions, ids, logprobs)
        end, padded = canvas.end, NOTHING
        self.eos.check(canvas, positions, self.stop_ids)
        if canvas.end < end:
            padded = np.arange(canvas.end, min(end, canvas.length))
        return Decision(positions, NOTHING, forced, None, 0, ids, logprobs, padded)
