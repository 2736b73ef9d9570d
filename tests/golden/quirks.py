"""Rules of released code that the library does not have, beside the traces that need them.

They are known by name to `parts` alone: what is registered here is no sampler of the library.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from dllm.core.canvas import BoolArray, Canvas, Edit, FloatArray, IntArray
from dllm.core.capabilities import REPEATABLE
from dllm.core.registry import Registry
from dllm.core.spec import parse
from dllm.samplers import SAMPLERS, Course, Part, Prediction, Selector, Transform, View
from dllm.samplers.base import Reads, even_share, top
from dllm.samplers.daedal import Daedal
from dllm.samplers.dcd import slide
from dllm.samplers.dsb import DSB
from dllm.samplers.factor import Factor
from dllm.samplers.llada import Quota, schedule
from dllm.samplers.lopa import LoPA
from dllm.samplers.scorers import Probability
from dllm.samplers.threshold import Threshold
from dllm.samplers.turn import Turn
from dllm.samplers.windows import StaticBlocks, WholeRegion

T = TypeVar("T")


class Released(Registry[T]):
    """The names of a registry of the library, and those of released code."""

    def __init__(self, library: Registry[T]) -> None:
        super().__init__(library.kind)
        self.library = library

    def __getitem__(self, name: str) -> type[T]:
        return self._entries[name] if name in self._entries else self.library[name]


PARTS: Released[Part] = Released(SAMPLERS)


def parts(spec: str) -> tuple[Part, ...]:
    """The parts that ``spec`` names, those of released code among them."""
    return parse(spec, PARTS)


@dataclass
class Deferred(Quota):
    """A schedule, and how many scheduled positions wait."""

    carry: int = 0


@PARTS.register("capped_threshold")
@dataclass(frozen=True)
class CappedThreshold(Selector):
    """Fast-dLLM's uncached rule for Dream: of the positions that a schedule of ``steps`` grants,
    the best is committed, and others that reach ``tau``; what is left waits for a later step."""

    scheduled = True

    tau: float = 0.9
    steps: int | None = None

    def companions(self, family: str) -> tuple[Part, ...]:
        return (WholeRegion(),)

    def begin_block(self, canvas: Canvas) -> None:
        schedule(canvas, self.steps, Deferred)
        canvas.state(Deferred).carry = 0

    def _scheduled(self, canvas: Canvas) -> int:
        state, step = canvas.state(Deferred), canvas.block_step
        due = even_share(state.items, state.steps, step) if step < state.steps else 0
        return min(due + state.carry, len(canvas.masks()))

    def rests(self, canvas: Canvas) -> bool:
        return self._scheduled(canvas) == 0

    def select(self, view: View) -> BoolArray:
        scheduled = self._scheduled(view.canvas)
        chosen: BoolArray = top(view.score, scheduled) & (view.score >= self.tau)
        if len(chosen):
            chosen[view.score.argmax()] = True
        view.canvas.state(Deferred).carry = scheduled - int(chosen.sum())
        return chosen


@PARTS.register("force_first")
@dataclass(frozen=True)
class ForceFirst(Course):
    """Cached code for Dream: exactly the first undecided position in the first step of a block,
    because nothing predicts it later; or in every ``every``-th step of the row."""

    offers = frozenset({REPEATABLE})

    every: int = 0

    def decide(self, turn: Turn) -> None:
        canvas = turn.canvas
        due = canvas.step % self.every == 0 if self.every else canvas.block_step == 0
        if due and not turn.stopped():
            turn.choose_these(np.arange(len(turn.view.positions)) == 0)


@PARTS.register("awake")
@dataclass(frozen=True)
class Awake(Selector):
    """Chooses nothing, and has a schedule take the steps in which `ForceFirst` does."""

    every: int = 0

    def rests(self, canvas: Canvas) -> bool:
        return (canvas.step % self.every if self.every else canvas.block_step) > 0

    def select(self, view: View) -> BoolArray:
        return np.zeros(len(view.positions), np.bool_)


@PARTS.register("sequential")
@dataclass(frozen=True)
class Sequential(Threshold):
    """S2D2's fallback of the same name: the leftmost ``n`` masks; where it looks for ``sure``
    ones, what is committed beside accepted drafts, which score infinity, goes by confidence."""

    sure: bool = False

    def select(self, view: View) -> BoolArray:
        if self.sure and np.isinf(view.score).any():
            return super().select(view)
        return np.arange(len(view.score)) < self.n


@dataclass(frozen=True)
class RecordedDraws(Transform):
    """Proposes what a recorded run drew: (position, token) pairs of every forward."""

    name = "recorded_draws"

    recorded: tuple[tuple[tuple[int, int], ...], ...] = ()

    def reads(self, canvas: Canvas) -> Reads:
        ids = np.zeros((len(canvas.tokens), 1), np.int64)
        for position, token in self.recorded[canvas.nfe]:
            ids[position] = token
        return Reads(ids=ids)

    def apply(self, canvas: Canvas, prediction: Prediction) -> Prediction:
        drawn = dict(self.recorded[canvas.nfe])
        token = np.array([drawn[p] for p in prediction.positions.tolist()], np.int64)
        return replace(prediction, token=token, logprob=prediction.asked[self.name][:, 0])


@PARTS.register("released_factor")
@dataclass(frozen=True)
class ReleasedFactor(Factor):
    """Also commits the last-ranked position when it alone fails its bound."""

    def select(self, view: View) -> BoolArray:
        chosen = super().select(view)
        return chosen | (len(chosen) - chosen.sum() == 1)


@PARTS.register("released_daedal")
@dataclass(frozen=True)
class ReleasedDaedal(Daedal):
    """An insertion beyond the largest canvas drops its end, and an answer without an end of text
    stays as long as it is."""

    def resize(self, view: View, committed: IntArray) -> tuple[Edit, ...]:
        canvas = view.canvas
        room = canvas.cap - (canvas.end - canvas.start)
        edits = super().resize(view, committed)
        if not edits or not edits[0].removed:  # none, or another block
            return ()
        over = max(0, self.expand - 1 - room)
        inserted = replace(edits[0], added=self.expand)
        last = canvas.end + self.expand - 1 - over
        return (inserted, Edit(last, over, 0)) if over else (inserted,)


@PARTS.register("released_blocks")
@dataclass(frozen=True)
class ReleasedBlocks(StaticBlocks):
    """WeDLM's block decoder knows masks by their id: where the model may propose the mask token,
    one that was committed is undecided again in the next block."""

    def advance(self, canvas: Canvas) -> None:
        before = canvas.window
        super().advance(canvas)
        low, high = canvas.window
        masks = np.flatnonzero(canvas.tokens[:low] == canvas.mask_id)
        if canvas.window != before and masks.size:
            canvas.remask(masks)
            canvas.window = int(masks[0]), high


@dataclass(slots=True)
class Fed:
    """What is fed of a row: the ``whole`` text, or positions ``first`` to ``end``."""

    first: int = -1
    end: int = 0
    whole: bool = True


@dataclass
class ReleasedBlock:
    """The block of DSB's released code, ``low`` to ``high``; how far what is fed reaches beyond it;
    the masks that were left when everything was computed last, None before the first time."""

    low: int = 0
    high: int = 0
    suffix: int = 0
    masks: int | None = None


@PARTS.register("released_dsb")
@dataclass(frozen=True)
class ReleasedDSB(DSB):
    """What the released code does beside its cache, with cache ``released_dsb``.

    The right edge counts from where the slice that is fed begins, so that positions behind the
    block are committed, too; on Dream a step that computes everything commits exactly the first
    undecided position, and the first two positions of a slice are predicted from
    the same row.
    """

    offers = frozenset()

    before: int = 24
    after: int = 0

    def companions(self, family: str) -> tuple[Part, ...]:
        return (SecondOfEquals(), *((FirstOfAll(),) if family == "dream" else ()))

    def advance(self, canvas: Canvas) -> None:
        block, fed = canvas.state(ReleasedBlock), canvas.state(Fed)
        masks, moved = int(canvas.masked.sum()), 0
        fed.whole = block.masks is None or block.masks - masks >= (self.block_length or 32)
        if block.masks is None:
            block.low, block.suffix = canvas.start, self.after
        else:  # past the block, if nothing in it is undecided
            open_ = canvas.masked[block.low : block.high]
            moved = int(open_.argmax()) if open_.any() else len(open_)
            block.low += moved
        if fed.whole:
            block.masks = masks
        block.high = self._edge(canvas, block.low)
        block.suffix = min(block.suffix, canvas.end - block.high)
        fed.first = block.low - min(max(moved, self.before), block.low)
        fed.end = block.high + block.suffix
        high = block.high if fed.whole else min(fed.end, fed.first + block.high)
        first = canvas.start + int(canvas.masked[canvas.start : canvas.end].argmax())
        slide(canvas, block.low, max(high, first + 1))


@dataclass(frozen=True)
class FirstOfAll(Course):
    """Exactly the first undecided position in a step that computes everything."""

    name = "first_of_all"

    def decide(self, turn: Turn) -> None:
        if turn.canvas.state(Fed).whole and not turn.stopped():
            turn.choose_these(np.arange(len(turn.view.positions)) == 0)


@dataclass(frozen=True)
class SecondOfEquals(Probability):
    """Of a first two that are equal the second is taken."""

    def score(self, canvas: Canvas, prediction: Prediction) -> FloatArray:
        score = super().score(canvas, prediction)
        if len(score) > 1 and score[0] == score[1]:
            score[0] = np.nextafter(score[0], np.float32(0))
        return score


@dataclass
class KeptLogits:
    """What was said of ``position``, the first open one, when the blocks before it were kept."""

    position: int = -1
    prediction: Prediction | None = None

    def put(self, prediction: Prediction) -> Prediction:
        """``prediction`` with what was kept."""
        here = np.flatnonzero(prediction.positions == self.position)
        if self.prediction is None or not here.size:
            return prediction
        changed = {}
        for name in ("token", "logprob", "entropy", "margin"):
            array, kept = getattr(prediction, name), getattr(self.prediction, name)
            if array is not None:
                changed[name] = array.copy()
                changed[name][here] = kept
        return replace(prediction, **changed)


@dataclass(frozen=True)
class KeepsLogits(Transform):
    """Predicts the first open position as when the blocks before it were kept."""

    name = "keeps_logits"

    def apply(self, canvas: Canvas, prediction: Prediction) -> Prediction:
        kept, low = canvas.state(KeptLogits), canvas.state(Fed).first
        if kept.position != low:
            here = np.flatnonzero(prediction.positions == low)
            kept.position = low
            kept.prediction = prediction.take(here) if here.size else None
        return kept.put(prediction)


@PARTS.register("released_lopa")
@dataclass(frozen=True)
class ReleasedLoPA(LoPA):
    """The row left of the open blocks is not computed again, what it predicts stays as it was; with
    cache ``released_d2f``."""

    def companions(self, family: str) -> tuple[Part, ...]:
        return (*super().companions(family), KeepsLogits())

    def _open(self, turn: Turn) -> list[Prediction]:
        result = []
        for seen, prediction in zip(turn.seen, super()._open(turn), strict=True):
            kept, fed = seen.canvas.state(KeptLogits), seen.canvas.state(Fed)
            result.append(kept.put(prediction) if kept.position == fed.first else prediction)
        return result
