"""What a sampler is made of.

A sampler answers five questions about one row: *where* may positions be committed (a `Window`),
*how sure* is the model (a `Scorer`, after `Transform`s of what it says), *which* positions now
(`Selector`s, a chain), *when to stop* (`Stop`s), *what to take back or try first* (a `Reviser`, an
`Explorer`).  Each answer is a `Part`: a small frozen dataclass with the paper's parameter names.
Parts are NumPy on one row; they never see a batch or a device.

Parts state what they need of one another as `Capability` objects; `compose` refuses a combination
whose needs nobody meets, with a sentence that names both sides and a way out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ..canvas import BoolArray, Canvas, FloatArray, IntArray
from ..capabilities import Capability
from ..spec import FamilyDefaults


@dataclass(frozen=True)
class Prediction:
    """What the model says about the positions a row asked for.

    All arrays have the length of ``positions`` (ascending int64).  ``token`` is the proposal x0,
    ``logprob`` its log-probability; ``margin`` p1 - p2, ``gap`` top logit minus second logit,
    ``entropy`` in nats, ``max_logprob`` log-probability of the likeliest token, ``kl`` divergence
    from the distribution of the row's previous step (infinite where there was none), ``top_token``
    / ``top_logprob`` (n, k): present when a part's ``statistics`` ask for them.  ``asked``: part
    name -> (n, m) log-probabilities of the ids that the part `Part.asks` for.
    """

    positions: IntArray
    token: IntArray
    logprob: FloatArray
    margin: FloatArray | None = None
    gap: FloatArray | None = None
    entropy: FloatArray | None = None
    max_logprob: FloatArray | None = None
    kl: FloatArray | None = None
    top_token: IntArray | None = None
    top_logprob: FloatArray | None = None
    asked: Mapping[str, FloatArray] = field(default_factory=dict)

    def take(self, keep: BoolArray | IntArray) -> Prediction:
        """The same for a subset of the positions."""

        def pick(array: Any) -> Any:
            return None if array is None else array[keep]

        return Prediction(
            self.positions[keep], self.token[keep], self.logprob[keep], pick(self.margin),
            pick(self.gap), pick(self.entropy), pick(self.max_logprob), pick(self.kl),
            pick(self.top_token), pick(self.top_logprob),
            {name: array[keep] for name, array in self.asked.items()},
        )  # fmt: skip

    def at(self, positions: IntArray) -> Prediction:
        """The same for some of the positions, which must be among these."""
        return self.take(np.searchsorted(self.positions, positions))


@dataclass(frozen=True)
class View:
    """What a part sees: the row, predictions for its undecided window positions, their scores.

    ``score`` (n,) float32: larger means commit earlier.  ``everything`` holds the predictions of
    all positions that some part `Part.wants`, the window's among them; ``shadow`` those of a
    reviser's shadow positions.  ``stop_ids`` are the ids that end a text.
    """

    canvas: Canvas
    prediction: Prediction
    score: FloatArray
    everything: Prediction
    shadow: Prediction | None = None
    stop_ids: tuple[int, ...] = ()

    @property
    def positions(self) -> IntArray:
        return self.prediction.positions

    def take(self, keep: BoolArray) -> View:
        """The same for a subset of the positions."""
        return replace(self, prediction=self.prediction.take(keep), score=self.score[keep])


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
    # Family -> field -> value: what the paper uses there, for fields left at None.
    family_defaults: ClassVar[FamilyDefaults] = {}

    def __str__(self) -> str:
        return self.name

    def companions(self) -> tuple[Part, ...]:
        """Parts that complete the paper's method where a composition leaves a role open."""
        return ()

    def wants(self, canvas: Canvas) -> IntArray | None:
        """Positions beyond the window's masks whose predictions it reads, ascending."""
        return None

    def asks(self, canvas: Canvas, positions: IntArray) -> IntArray | None:
        """(n, m) ids whose log-probabilities it reads at ``positions``."""
        return None


class Window(Part):
    """Where the step may commit."""

    role: ClassVar[str] = "window"

    def advance(self, canvas: Canvas) -> None:
        """Before a forward: make sure the window holds an undecided position, if any is left."""
        raise NotImplementedError

    def settle(self, canvas: Canvas, prediction: Prediction) -> None:
        """After a forward: bounds that depend on what the model says."""

    def reconsiders(self, view: View, chosen: BoolArray) -> bool:
        """Whether the window has just grown and the step's commits should wait for that."""
        return False

    def decides(self, canvas: Canvas) -> bool:
        """Whether the window itself says what this step commits, in place of the selectors."""
        return False

    def select(self, view: View) -> BoolArray:
        """(n,) bool over ``view.positions``, in a step that the window `decides`."""
        raise NotImplementedError


class Transform(Part):
    """What becomes of the predictions before anyone looks at them."""

    role: ClassVar[str] = "transform"

    def apply(self, canvas: Canvas, prediction: Prediction) -> Prediction:
        raise NotImplementedError


class Scorer(Part):
    """How sure the model is: larger commits earlier."""

    role: ClassVar[str] = "scorer"

    def score(self, canvas: Canvas, prediction: Prediction) -> FloatArray:
        raise NotImplementedError


class Selector(Part):
    """Which positions of the view are committed now.

    A selector that ``extends`` adds to what others chose: it does not stand alone in a chain, and
    sees at least one commit before it.
    """

    role: ClassVar[str] = "selector"
    extends: ClassVar[bool] = False

    def rests(self, canvas: Canvas) -> bool:
        """Whether the schedule grants this step nothing, so that no forward is needed."""
        return False

    def select(self, view: View) -> BoolArray:
        """(n,) bool over ``view.positions``: those that no earlier selector has chosen."""
        raise NotImplementedError

    def tokens(self, view: View) -> IntArray:
        """(n,) ids that it commits: the proposals, unless it says otherwise."""
        return view.prediction.token


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

    def foresee(self, canvas: Canvas, prediction: Prediction, stop_ids: tuple[int, ...]) -> None:
        """Before the step's own commits: cut the region by what is proposed."""

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

    def shadow(self, canvas: Canvas) -> IntArray | None:
        """Positions to predict once more from all tokens but their own (WINO), ascending."""
        return None

    def revise(self, view: View, committed: IntArray) -> IntArray:
        """Positions to return to undecided.  The predictions are from before the commits."""
        raise NotImplementedError


class Explorer(Part):
    """What to try first: several continuations of a row, fed in one forward.

    After the step's own commits it proposes gambles: sets of further positions to commit with
    their proposals.  Each is a branch; an empty one is the row as it stands.  The next forward
    feeds all branches, `choose` picks one, its gamble becomes final, and the step goes on with its
    predictions: no forward is spent on choosing.
    """

    role: ClassVar[str] = "explorer"

    @property
    def width(self) -> int:
        """Most branches it feeds at once."""
        raise NotImplementedError

    def instead(self, view: View, chosen: BoolArray) -> bool:
        """Whether gambles replace the commit that the progress guarantee would force."""
        return False

    def gambles(self, view: View, chosen: BoolArray) -> list[BoolArray]:
        """Branches as (n,) bool over ``view.positions``, disjoint from the commits ``chosen``;
        none means: feed the row as it stands."""
        raise NotImplementedError

    def choose(
        self, decide: Decide, branches: Sequence[Canvas], found: Sequence[Prediction]
    ) -> int:
        """Index of the branch to keep.  ``decide`` makes an inner step on a canvas of its own."""
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


NOTHING: IntArray = np.zeros(0, np.int64)
NO_SCORES: FloatArray = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Gamble:
    """Commits that one branch makes beyond its row."""

    positions: IntArray
    tokens: IntArray
    logprobs: FloatArray


@dataclass(frozen=True)
class Decision:
    """What one step did to one row: ``committed`` positions with their ``tokens`` and
    ``logprobs``, ``remasked`` positions; ``forced``: whether only the progress guarantee
    committed; ``gambles``: the branches that the next forward feeds; ``explored``: branches that
    were fed in this step beyond the one kept."""

    committed: IntArray
    remasked: IntArray
    forced: bool = False
    gambles: tuple[Gamble, ...] = ()
    explored: int = 0
    tokens: IntArray = field(default_factory=lambda: NOTHING)
    logprobs: FloatArray = field(default_factory=lambda: NO_SCORES)

    def after(self, gamble: Gamble | None, explored: int) -> Decision:
        """The same with the gamble that came before it."""
        if gamble is None:
            return replace(self, explored=explored)
        return replace(
            self,
            committed=np.concatenate([gamble.positions, self.committed]),
            tokens=np.concatenate([gamble.tokens, self.tokens]),
            logprobs=np.concatenate([gamble.logprobs, self.logprobs]),
            explored=explored,
        )

    @property
    def bits(self) -> float:
        """Information committed in this step: sum of -log2 p (2511.21103)."""
        return float(-self.logprobs.sum() / np.log(2))


Decide = Callable[[Canvas, Prediction], Decision]


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
    stop_ids: tuple[int, ...] = ()

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        single = tuple(part for part in (self.reviser, self.explorer) if part is not None)
        return (
            self.window, *self.transforms, self.scorer, *self.selectors, self.eos, *self.stops,
            *single,
        )  # fmt: skip

    @cached_property
    def statistics(self) -> frozenset[str]:
        """Fields of `Prediction` that some part reads."""
        return frozenset().union(*(part.statistics for part in self.parts))

    @cached_property
    def _wanting(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if type(part).wants is not Part.wants)

    @cached_property
    def _asking(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if type(part).asks is not Part.asks)

    def prepare(self, canvas: Canvas) -> bool:
        """Move the window; False when the schedule grants this step nothing."""
        self.window.advance(canvas)
        # Every selector is asked, so that each sets up its schedule when a window opens.
        active = [not selector.rests(canvas) for selector in self.selectors]
        return any(active) or self.window.decides(canvas)

    def targets(self, canvas: Canvas) -> IntArray:
        """Positions whose predictions this step needs, ascending."""
        masks = canvas.masks()
        wanted = [w for part in self._wanting if (w := part.wants(canvas)) is not None]
        return np.unique(np.concatenate([masks, *wanted])) if wanted else masks

    def shadow(self, canvas: Canvas) -> IntArray:
        """Positions to predict once more from all tokens but their own, ascending."""
        found = None if self.reviser is None else self.reviser.shadow(canvas)
        return NOTHING if found is None else found

    def asks(self, canvas: Canvas, positions: IntArray) -> dict[str, IntArray]:
        """Part name -> (n, m) ids whose log-probabilities it reads at ``positions``."""
        found = {part.name: part.asks(canvas, positions) for part in self._asking}
        return {name: ids for name, ids in found.items() if ids is not None}

    @cached_property
    def inner(self) -> Sampler:
        """The same without its explorer."""
        return replace(self, explorer=None)

    def adopt(self, canvas: Canvas, gamble: Gamble) -> None:
        """Make a gamble final."""
        if gamble.positions.size:
            canvas.commit(gamble.positions, gamble.tokens, gamble.logprobs)
            self.eos.check(canvas, gamble.positions, self.stop_ids)

    @property
    def offers(self) -> frozenset[Capability]:
        """What it offers to a cache: foresight, when no part looks at predictions; a fixed
        window."""
        looks = self.stops or self.reviser or self.explorer or self.transforms or self._wanting
        blind = () if looks or self.eos.reorders else (self.scorer, *self.selectors)
        found = frozenset.intersection(*(p.offers for p in blind)) if blind else frozenset()
        return found | self.window.offers

    def foreseen(self, canvas: Canvas) -> IntArray:
        """The positions that this step is going to commit, ascending; only with foresight."""
        positions = canvas.masks()
        blank = Prediction(
            positions, np.zeros_like(positions), np.zeros(len(positions), np.float32)
        )
        score = self.scorer.score(canvas, blank)
        chosen, _, _ = self._select(View(canvas, blank, score, blank, None, self.stop_ids))
        return positions[chosen]

    def decide(
        self, canvas: Canvas, prediction: Prediction, shadow: Prediction | None = None
    ) -> Decision:
        """Commit, revise and stop on one row, given predictions for `targets`."""
        self.window.settle(canvas, prediction)
        for transform in self.transforms:
            prediction = transform.apply(canvas, prediction)
        view = self._view(canvas, prediction, shadow)
        if any(stop.fill(view) for stop in self.stops):
            return self._fill(view)
        chosen, tokens, forced = self._select(view)
        if self.window.reconsiders(view, chosen):
            return Decision(NOTHING, NOTHING)
        canvas.forced += forced
        decision = self._commit(view, chosen, tokens)
        remasked = NOTHING
        if self.reviser is not None:
            canvas.memory["revises"] = True  # end-of-text rules wait for the window to close
            remasked = self.reviser.revise(view, decision.committed)
            canvas.remask(remasked)
        self.eos.check(canvas, decision.committed, self.stop_ids)
        gambles = self._gambles(view, chosen)
        return replace(decision, remasked=remasked, forced=forced, gambles=gambles)

    def _view(self, canvas: Canvas, prediction: Prediction, shadow: Prediction | None) -> View:
        self.eos.foresee(canvas, prediction, self.stop_ids)
        here = prediction
        low, high = canvas.window
        at = prediction.positions
        keep = canvas.masked[at] & (at >= low) & (at < high)
        if not keep.all():
            here = prediction.take(keep)
        score = self.scorer.score(canvas, here)
        view = View(canvas, here, score, prediction, shadow, self.stop_ids)
        rescored = self.eos.rescore(view)
        return view if rescored is score else replace(view, score=rescored)

    def _fill(self, view: View) -> Decision:
        """Commit all that is undecided with its proposal."""
        found = view.everything.take(view.canvas.masked[view.everything.positions])
        whole = replace(view, prediction=found)
        decision = self._commit(whole, np.ones(len(found.positions), np.bool_), found.token)
        self.eos.check(view.canvas, decision.committed, self.stop_ids)
        return decision

    def _select(self, view: View) -> tuple[BoolArray, IntArray, bool]:
        """What is committed, (n,) bool, with which ids, (n,), and whether it had to be forced."""
        if self.window.decides(view.canvas):
            return self.window.select(view), view.prediction.token, False
        chosen, tokens = self.selectors[0].select(view), self.selectors[0].tokens(view)
        forced = False
        for selector in self.selectors[1:]:
            if selector.extends:
                forced |= self._force(view, chosen)
            left = ~chosen
            rest = view.take(left)
            more = selector.select(rest)
            chosen[left] = more
            if (own := selector.tokens(rest)) is not rest.prediction.token:
                tokens = tokens.copy()
                tokens[np.flatnonzero(left)[more]] = own[more]
        return chosen, tokens, forced | self._force(view, chosen)

    def _force(self, view: View, chosen: BoolArray) -> bool:
        """The progress guarantee: a step that was paid for decides something."""
        if not len(chosen) or chosen.any():
            return False
        if self.explorer is not None and self.explorer.instead(view, chosen):
            return False
        chosen[view.score.argmax()] = True
        return True

    def _commit(self, view: View, chosen: BoolArray, tokens: IntArray) -> Decision:
        positions, ids = view.positions[chosen], tokens[chosen]
        logprobs = view.prediction.logprob[chosen]
        view.canvas.commit(positions, ids, logprobs)
        return Decision(positions, NOTHING, tokens=ids, logprobs=logprobs)

    def _gambles(self, view: View, chosen: BoolArray) -> tuple[Gamble, ...]:
        if self.explorer is None or view.canvas.finished:
            return ()
        p = view.prediction
        sets = self.explorer.gambles(view, chosen)
        return tuple(Gamble(p.positions[s], p.token[s], p.logprob[s]) for s in sets)
