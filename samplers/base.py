"""What a sampler is made of.

A sampler answers four questions about one row: *where* may positions be committed (a `Window`),
*how sure* is the model (a `Scorer`, after `Transform`s of what it says), *which* positions now
(`Selector`s, a chain), *when to stop* (`Stop`s, an `EosRule`).  A step then goes: predict, choose,
commit, look for an end; parts that make it go another way are the `Course`s of `turn`.  Each answer
is a `Part`: a small frozen dataclass with the paper's parameter names.  Parts are NumPy on one row;
they never see a batch or a device.

Parts state what they need of one another as `Capability` objects; `compose` refuses a combination
whose needs nobody meets, with a sentence that names both sides and a way out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..core.canvas import BoolArray, Canvas, FloatArray, IntArray
from ..core.capabilities import Capability
from ..core.errors import ConfigError
from ..core.limits import Limits
from ..core.spec import FamilyDefaults, check_part

NOTHING: IntArray = np.zeros(0, np.int64)
NO_SCORES: FloatArray = np.zeros(0, np.float32)
NO_IDS: Mapping[str, FloatArray] = {}


@dataclass(slots=True, eq=False)
class Prediction:
    """What the model says about the positions a row asked for.

    All arrays have the length of ``positions`` (ascending int64).  ``token`` is the proposal x0,
    ``logprob`` its log-probability; ``margin`` p1 - p2, ``gap`` top logit minus second logit,
    ``entropy`` in nats, ``max_logprob`` log-probability of the likeliest token, ``top_token`` /
    ``top_logprob`` (n, k): present when a part's ``statistics`` ask for them.  ``asked``: part
    name -> (n, m) log-probabilities of the ids that the part `Part.reads`.
    ``joint``: the row has a format, and the proposals at undecided positions are one completion in
    it: any of them may be committed, but nothing in their place; ``logprob`` is then the marginal
    among all such completions, and everything else what the model says without it.
    """

    positions: IntArray
    token: IntArray
    logprob: FloatArray
    margin: FloatArray | None = None
    gap: FloatArray | None = None
    entropy: FloatArray | None = None
    max_logprob: FloatArray | None = None
    top_token: IntArray | None = None
    top_logprob: FloatArray | None = None
    asked: Mapping[str, FloatArray] = field(default_factory=lambda: NO_IDS)
    joint: bool = False

    def take(self, keep: BoolArray | IntArray) -> Prediction:
        """The same for a subset of the positions."""

        if keep.dtype == np.bool_:  # looked through once, not per array
            keep = keep.nonzero()[0]

        def pick(array: Any) -> Any:
            return None if array is None else array[keep]

        return Prediction(
            self.positions[keep], self.token[keep], self.logprob[keep], pick(self.margin),
            pick(self.gap), pick(self.entropy), pick(self.max_logprob), pick(self.top_token),
            pick(self.top_logprob), {name: array[keep] for name, array in self.asked.items()},
            self.joint,
        )  # fmt: skip

    def of_window(self, canvas: Canvas) -> Prediction:
        """The same for the undecided positions of the row's window."""
        low, high = canvas.window
        at = self.positions
        keep = canvas.masked[at] & (at >= low) & (at < high)
        return self if np.count_nonzero(keep) == len(keep) else self.take(keep)

    def at(self, positions: IntArray) -> Prediction:
        """The same for some of the positions, which must be among these."""
        return self.take(np.searchsorted(self.positions, positions))


@dataclass(slots=True, eq=False)
class View:
    """What a part sees: the row, predictions for its undecided window positions, their scores.

    ``score`` (n,) float32: larger means commit earlier.  ``all_predictions`` are those of all
    positions that some part `Part.reads`, the window's among them.  ``stop_ids`` are the ids that
    end a text, none where nothing does.
    """

    canvas: Canvas
    prediction: Prediction
    score: FloatArray
    all_predictions: Prediction
    stop_ids: tuple[int, ...] = ()

    @property
    def positions(self) -> IntArray:
        """(n,) int64, ascending: the masked positions of the window."""
        return self.prediction.positions

    def take(self, keep: BoolArray | IntArray) -> View:
        """The same for a subset of the positions."""
        return View(
            self.canvas, self.prediction.take(keep), self.score[keep], self.all_predictions,
            self.stop_ids,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reads:
    """What a part reads of a step beside the window's masks: the predictions of further
    ``positions`` (n,), ascending, and the log-probabilities of ``ids`` (N, m), a row for every
    position of the text.  None: nothing."""

    positions: IntArray | None = None
    ids: IntArray | None = None


NOTHING_MORE = Reads()


class Draws(NamedTuple):
    """The ``temperature`` of the distribution that a step reads and draws from; ``signal``: the
    share of positions that are not noise, where it reads each of them without what it holds
    (leave-one-out), and draws from that with noise for the rest."""

    temperature: float = 1.0
    signal: float | None = None


# (canvas, positions) -> (n,) bool: where an id may not be proposed in this step.
Ban = Callable[[Canvas, IntArray], BoolArray]


@dataclass(frozen=True)
class Part:
    """A piece of a sampler.  Class attributes describe it to `compose` and to `available`; ``role``
    is said once, where a kind of part is declared: ``class Window(Part, role="window")``."""

    name: ClassVar[str] = ""
    role: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    arxiv: ClassVar[str] = ""
    needs: ClassVar[frozenset[Capability]] = frozenset()
    offers: ClassVar[frozenset[Capability]] = frozenset()
    # Fields of `Prediction` that it reads -> how much: so many of the likeliest tokens
    # ("top_token", "top_logprob"), else 1.
    statistics: ClassVar[Mapping[str, int]] = {}
    bans: ClassVar[Mapping[int, Ban | None]] = {}  # id -> where it is never proposed; None: nowhere
    limits: ClassVar[Limits] = {}  # what values its arguments may take
    # Family -> field -> value: what the paper uses there, for fields left at None.
    family_defaults: ClassVar[FamilyDefaults] = {}

    def __init_subclass__(cls, role: str | None = None, **facts: Any) -> None:
        super().__init_subclass__(**facts)
        if role is not None:
            cls.role = role

    def __post_init__(self) -> None:
        check_part(self)

    def __str__(self) -> str:
        return self.name

    def companions(self, family: str) -> tuple[Part, ...]:
        """Parts that complete the paper's method on models of a ``family`` where a composition
        leaves a role open, the preferred ones first; what needs something that the given parts do
        not offer is left out."""
        return ()

    def draws(self, canvas: Canvas) -> Draws | None:
        """How this step reads and draws, where the part says it; None: as the call does."""
        return None

    def begin_block(self, canvas: Canvas) -> None:
        """Before a forward, when the window has just been opened: set up what belongs to a block,
        e.g. a schedule.  What is asked before a forward (`reads`, `Selector.rests`, ...) changes
        nothing."""

    def reads(self, canvas: Canvas) -> Reads:
        """What it reads of the next step beside the window's masks."""
        return NOTHING_MORE


class Window(Part, role="window"):
    """Where the step may commit."""

    def advance(self, canvas: Canvas) -> None:
        """Before a forward, while something is undecided: make sure the window holds some of it."""
        raise NotImplementedError

    def settle(self, canvas: Canvas, prediction: Prediction) -> None:
        """After a forward: bounds that depend on what the model says."""


class Transform(Part, role="transform"):
    """What becomes of the predictions before anyone looks at them."""

    def apply(self, canvas: Canvas, prediction: Prediction) -> Prediction:
        """The predictions, of the same positions, as all other parts see them."""
        raise NotImplementedError


class Scorer(Part, role="scorer"):
    """How sure the model is: larger commits earlier."""

    def score(self, canvas: Canvas, prediction: Prediction) -> FloatArray:
        """(n,) float32, a score for each of ``prediction.positions``."""
        raise NotImplementedError


class Selector(Part, role="selector"):
    """Which positions of the view are committed now."""

    scheduled: ClassVar[bool] = False  # whether a number of steps is planned

    def rests(self, canvas: Canvas) -> bool:
        """Whether the schedule grants this step nothing, so that no forward is needed."""
        return False

    def select(self, view: View) -> BoolArray:
        """(n,) bool over ``view.positions``: those that no earlier selector has chosen."""
        raise NotImplementedError


class Stop(Part, role="stop"):
    """When to give up refining."""

    def fill(self, view: View) -> bool:
        """Before the step's own commits: commit all that is undecided with its proposal, finish?"""
        raise NotImplementedError


class EosRule(Part, role="eos"):
    """What a stop id does to the rest of a row.  It offers `FORESIGHT` if it changes no scores."""

    ends: ClassVar[bool] = True  # whether a stop id ends anything

    def rescore(self, view: View) -> FloatArray:
        """Before the step's own commits: the scores as this rule changes them.  A rule that cuts
        by what is proposed remembers it here."""
        return view.score

    def check(self, canvas: Canvas, committed: IntArray, stop_ids: tuple[int, ...]) -> None:
        """After the commits: cut the row or finish it when its text has ended."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The parts that every step asks, in their order.  ``stop_ids`` are the ids that end a text."""

    window: Window
    scorer: Scorer
    selectors: tuple[Selector, ...]
    eos: EosRule
    stops: tuple[Stop, ...] = ()
    transforms: tuple[Transform, ...] = ()
    stop_ids: tuple[int, ...] = ()

    @cached_property
    def settles(self) -> bool:
        """Whether the window changes by what is predicted."""
        return type(self.window).settle is not Window.settle

    @cached_property
    def reads_more(self) -> bool:
        """Whether predictions may be of other positions than the window's masks."""
        return True

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a text, none where nothing does."""
        return self.stop_ids if self.eos.ends else ()

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

    def choose(self, view: View, force: bool = True) -> tuple[BoolArray, bool]:
        """(n,) bool over the view's positions: which are committed; and whether one had to be
        forced, which happens where ``force`` is set and nothing else was chosen."""
        if not len(view.score):  # a decided window that a reviser holds open
            return np.zeros(0, np.bool_), False
        chosen = checked(self.selectors[0], view)
        for selector in self.selectors[1:]:
            left = (~chosen).nonzero()[0]
            chosen[left] = checked(selector, view.take(left))
        return chosen, force and forced(view, chosen)


def forced(view: View, chosen: BoolArray) -> bool:
    """The progress guarantee: a step that was paid for decides something."""
    if not len(chosen) or np.count_nonzero(chosen):
        return False
    chosen[view.score.argmax()] = True
    return True


def checked(selector: Selector, view: View) -> BoolArray:
    """What a selector selects; an error that names it where that is no choice of positions."""
    chosen: object = selector.select(view)
    n = len(view.score)
    if isinstance(chosen, np.ndarray) and chosen.dtype == np.bool_ and chosen.shape == (n,):
        return chosen
    if isinstance(chosen, np.ndarray):
        got = f"an array of {chosen.dtype}, shape {chosen.shape}"
    else:
        got = "None" if chosen is None else f"a {type(chosen).__name__}"
    raise ConfigError(
        f"{selector.name or type(selector).__name__}.select returned {got}, not one bool per "
        f"position of the view, shape ({n},); for indices: chosen = np.zeros({n}, bool); "
        "chosen[indices] = True"
    )


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


def even_share(items: int, steps: int, step: int) -> int:
    """What falls to a ``step`` of ``items`` over ``steps``, evenly; larger shares come first."""
    base, rest = divmod(items, steps)
    return base + (step < rest)
