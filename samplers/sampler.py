"""A complete sampler: the order in which one step asks its parts.

Parts and what they see are in `base`; how a string becomes a `Sampler` is in `compose`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..canvas import BoolArray, Canvas, Edit, FloatArray, IntArray
from ..capabilities import FIXED_WINDOW, JUDGED, SHADOW, Capability
from ..errors import ConfigError
from .base import (
    NOTHING,
    Decision,
    EosRule,
    Explorer,
    Length,
    Part,
    Prediction,
    Reviser,
    Scorer,
    Selector,
    Stop,
    Transform,
    Trial,
    View,
    Window,
)


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
class Drafts:
    """What a step that proposed drafts predicted, and its scores, until they are verified."""

    prediction: Prediction
    score: FloatArray


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
            for name in ("begin_block", "wants", "asks")
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

    def prepare(self, canvas: Canvas) -> bool:
        """Move the window; False when the schedule grants this step nothing."""
        if self.probes(canvas):
            return True
        block = canvas.block
        if not canvas.revising and np.count_nonzero(canvas.masked[canvas.start : canvas.end]):
            self.window.advance(canvas)
        if canvas.block != block:
            for part in self._overriding["begin_block"]:
                part.begin_block(canvas)
        if self.window.decides(canvas) or not all(s.rests(canvas) for s in self.selectors):
            return True
        return canvas.revising and not canvas.masks().size

    def probes(self, canvas: Canvas) -> bool:
        """Whether the next forward only looks for the length of the text."""
        return self.length is not None and self.length.probes(canvas)

    def _asked(self, parts: tuple[Part, ...], canvas: Canvas) -> tuple[Part, ...]:
        """Those whose wishes count in the next step."""
        return tuple(p for p in parts if p is self.length) if self.probes(canvas) else parts

    def targets(self, canvas: Canvas) -> IntArray:
        """Positions whose predictions this step needs, ascending."""
        masks, parts = canvas.masks(), self._asked(self._overriding["wants"], canvas)
        wanted = [w for part in parts if (w := part.wants(canvas)) is not None]
        return np.unique(np.concatenate([masks, *wanted])) if wanted else masks

    @cached_property
    def shadows(self) -> bool:
        """Whether some forwards feed shadow tokens."""
        return any(part.needs & {JUDGED, SHADOW} for part in self.parts)

    @cached_property
    def verifies(self) -> bool:
        """Whether what is tried is a draft that the next forward judges."""
        return self.explorer is not None and self.explorer.verifies

    def shadow(self, canvas: Canvas, trials: Sequence[Trial] = ()) -> IntArray:
        """Positions to predict once more from all tokens but their own, ascending."""
        part = self.explorer if self.verifies and trials else self.reviser
        result = None if part is None else part.shadow(canvas)
        return NOTHING if result is None else result

    def single(self, canvas: Canvas, verifies: bool) -> tuple[int, int]:
        """The positions of the next forward that attend as if blocks had one position."""
        return (0, 0) if self.explorer is None else self.explorer.single(canvas, verifies)

    def asks(self, canvas: Canvas, positions: IntArray) -> dict[str, IntArray]:
        """Part name -> (n, m) ids whose log-probabilities it reads at ``positions``."""
        parts = self._asked(self._overriding["asks"], canvas)
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

    def adopt(self, canvas: Canvas, trial: Trial) -> None:
        """Make a trial final."""
        if trial.positions.size:
            canvas.commit(trial.positions, trial.tokens, trial.logprobs)
            self.eos.check(canvas, trial.positions, self.stop_ids)

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
        chosen, *_ = self._select(View(canvas, blank, score, blank, None, self.stop_ids))
        return positions[chosen]

    def decide(
        self, canvas: Canvas, prediction: Prediction, shadow: Prediction | None = None
    ) -> Decision:
        """Commit, revise and stop on one row, given predictions for `targets`."""
        if self.length is not None and self.probes(canvas):
            probed = self.length.probe(canvas, prediction)
            return Decision(NOTHING, NOTHING, edits=probed, probe=True)
        if self.settles:
            self.window.settle(canvas, prediction)
        for transform in self.transforms:
            prediction = transform.apply(canvas, prediction)
        view = self._view(canvas, prediction, shadow)
        for stop in self.stops:
            if stop.fill(view):
                return self._fill(view)
        if self.explorer is not None and self.explorer.defers(view):
            canvas.states[Drafts] = Drafts(prediction, view.score)
            nothing = np.zeros(len(view.positions), np.bool_)
            return self._commit(view, nothing, view.prediction.token, view.prediction.logprob)
        chosen, tokens, logprobs, forced = self._select(view)
        if self.window.reconsiders(view, chosen):
            return Decision(NOTHING, NOTHING)
        canvas.forced += forced
        decision = self._commit(view, chosen, tokens, logprobs)
        decision.forced = forced
        return decision

    def verify(self, canvas: Canvas, shadow: Prediction) -> Decision:
        """Commit what stands of the drafts of the step before, given the shadow tokens."""
        drafts, explorer = canvas.states.pop(Drafts), self.explorer
        assert explorer is not None
        here = drafts.prediction.of_window(canvas)
        view = View(canvas, here, drafts.score, drafts.prediction, shadow, self._ends)
        chosen, tokens, logprobs, more = explorer.accept(view)
        if more:  # what is accepted counts as the surest
            score = np.where(chosen, np.inf, view.score).astype(np.float32)
            chosen = chosen | self._select(replace(view, score=score, shadow=None))[0]
        return self._commit(view, chosen, tokens, logprobs)

    def _commit(
        self, view: View, chosen: BoolArray, tokens: IntArray, logprobs: FloatArray
    ) -> Decision:
        """Commit what is ``chosen``, revise, stop, and propose what to try."""
        canvas, at = view.canvas, chosen.nonzero()[0]
        positions, ids, logprobs = view.prediction.positions[at], tokens[at], logprobs[at]
        canvas.commit(positions, ids, logprobs)
        remasked = NOTHING
        if self.reviser is not None:
            revision = self.reviser.revise(view, positions)
            remasked = revision.remasked
            canvas.remask(remasked)
            canvas.commit(revision.replaced, revision.tokens, revision.logprobs)
            positions = np.concatenate([positions, revision.replaced])
            ids = np.concatenate([ids, revision.tokens])
            logprobs = np.concatenate([logprobs, revision.logprobs])
            # Until the window closes no text ends, and no other window opens.
            canvas.revising = revision.open or bool(canvas.masks().size)
        end, padded = canvas.end, NOTHING
        self.eos.check(canvas, positions, self.stop_ids)
        if canvas.end < end:
            padded = np.arange(canvas.end, min(end, canvas.length))
        trials = () if self.explorer is None else self._trials(view, chosen)
        edits: tuple[Edit, ...] = ()
        if self.length is not None and canvas.stop_position is None and not canvas.finished:
            edits = self.length.resize(view, positions)
        return Decision(positions, remasked, False, trials, 0, ids, logprobs, padded, edits)

    def _view(self, canvas: Canvas, prediction: Prediction, shadow: Prediction | None) -> View:
        here = prediction.of_window(canvas) if self.reads_more else prediction
        score = self.scorer.score(canvas, here)
        view = View(canvas, here, score, prediction, shadow, self._ends)
        rescored = self.eos.rescore(view)
        return view if rescored is score else replace(view, score=rescored)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return self.stop_ids if self.eos.ends else ()

    def _fill(self, view: View) -> Decision:
        """Commit all that is undecided with its proposal."""
        p = view.all_predictions.take(view.canvas.masked[view.all_predictions.positions])
        view.canvas.commit(p.positions, p.token, p.logprob)
        self.eos.check(view.canvas, p.positions, self.stop_ids)
        return Decision(p.positions, NOTHING, tokens=p.token, logprobs=p.logprob)

    def _select(self, view: View) -> tuple[BoolArray, IntArray, FloatArray, bool]:
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
                forced |= self._force(view, chosen)
            left = (~chosen).nonzero()[0]
            rest = view.take(left)
            more = checked(selector, rest)
            chosen[left] = more
            own, sure = selector.proposals(rest, more)
            if own is not rest.prediction.token:
                tokens, logprobs = tokens.copy(), logprobs.copy()
                tokens[left[more]], logprobs[left[more]] = own[more], sure[more]
        return chosen, tokens, logprobs, forced | self._force(view, chosen)

    def _force(self, view: View, chosen: BoolArray) -> bool:
        """The progress guarantee: a step that was paid for decides something."""
        if not len(chosen) or np.count_nonzero(chosen):
            return False
        if self.explorer is not None and self.explorer.instead(view, chosen):
            return False
        chosen[view.score.argmax()] = True
        return True

    def _trials(self, view: View, chosen: BoolArray) -> tuple[Trial, ...]:
        if self.explorer is None or view.canvas.finished:
            return ()
        p = view.prediction
        sets = self.explorer.trials(view, chosen)
        return tuple(Trial(p.positions[s], p.token[s], p.logprob[s]) for s in sets)
