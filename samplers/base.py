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

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from ..core.canvas import BoolArray, Canvas, Edit, FloatArray, IntArray
from ..core.capabilities import Capability
from ..core.limits import Limits, check_limits
from ..core.spec import FamilyDefaults

NOTHING: IntArray = np.zeros(0, np.int64)
NO_SCORES: FloatArray = np.zeros(0, np.float32)


NO_IDS: Mapping[str, FloatArray] = {}


@dataclass(slots=True, eq=False)
class Prediction:
    """What the model says about the positions a row asked for.

    All arrays have the length of ``positions`` (ascending int64).  ``token`` is the proposal x0,
    ``logprob`` its log-probability; ``margin`` p1 - p2, ``gap`` top logit minus second logit,
    ``entropy`` in nats, ``max_logprob`` log-probability of the likeliest token, ``kl`` divergence
    from the distribution of the row's previous step (infinite where there was none), ``top_token``
    / ``top_logprob`` (n, k): present when a part's ``statistics`` ask for them.  ``asked``: part
    name -> (n, m) log-probabilities of the ids that the part `Part.asks` for.  ``attention``
    (L, L) float32, by position and not by target: what each of the L live positions attends to,
    mean over the heads of the layers that parts want `Part.maps` of; None if none do.
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
    kl: FloatArray | None = None
    top_token: IntArray | None = None
    top_logprob: FloatArray | None = None
    asked: Mapping[str, FloatArray] = field(default_factory=lambda: NO_IDS)
    attention: FloatArray | None = None
    joint: bool = False

    def take(self, keep: BoolArray | IntArray) -> Prediction:
        """The same for a subset of the positions."""

        if keep.dtype == np.bool_:  # looked through once, not per array
            keep = keep.nonzero()[0]

        def pick(array: Any) -> Any:
            return None if array is None else array[keep]

        return Prediction(
            self.positions[keep], self.token[keep], self.logprob[keep], pick(self.margin),
            pick(self.gap), pick(self.entropy), pick(self.max_logprob), pick(self.kl),
            pick(self.top_token), pick(self.top_logprob),
            {name: array[keep] for name, array in self.asked.items()}, self.attention, self.joint,
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
    positions that some part `Part.wants`, the window's among them.  ``stop_ids`` are the ids that
    end a text, none where nothing does.
    """

    canvas: Canvas
    prediction: Prediction
    score: FloatArray
    all_predictions: Prediction
    stop_ids: tuple[int, ...] = ()

    @property
    def positions(self) -> IntArray:
        return self.prediction.positions

    def take(self, keep: BoolArray | IntArray) -> View:
        """The same for a subset of the positions."""
        return View(
            self.canvas, self.prediction.take(keep), self.score[keep], self.all_predictions,
            self.stop_ids,
        )  # fmt: skip


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

    def after(self, trial: Trial | None, explored: int) -> Decision:
        """The same with the trial that came before it."""
        if trial is None:
            return replace(self, explored=explored)
        return replace(
            self,
            committed=np.concatenate([trial.positions, self.committed]),
            tokens=np.concatenate([trial.tokens, self.tokens]),
            logprobs=np.concatenate([trial.logprobs, self.logprobs]),
            explored=explored,
        )

    @property
    def bits(self) -> float:
        """Information committed in this step: sum of -log2 p (2511.21103)."""
        return float(-self.logprobs.sum() / np.log(2))


@dataclass(frozen=True, slots=True)
class Feed:
    """What the next forward feeds of a row.

    ``branches``: in place of the row as it stands, texts with these commits beyond it, each in a
    lane of its own; none: the row itself.  ``masks``: positions that are fed once more, as [MASK]s
    that see every token but the one in their place.  ``ordered``: positions, from the first on and
    below the second, that see only what is left of them, as if blocks had one position."""

    branches: tuple[Trial, ...] = ()
    masks: IntArray = field(default_factory=lambda: NOTHING)
    ordered: tuple[int, int] = (0, 0)


THE_ROW = Feed()


@dataclass(slots=True, eq=False)
class Seen:
    """What the model says of the row, or of one branch: ``prediction`` of what was asked for,
    ``masks`` of those fed once more; ``canvas`` is the text that was fed."""

    canvas: Canvas
    prediction: Prediction
    masks: Prediction | None = None


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
    limits: ClassVar[Limits] = {}  # what values its arguments may take
    # Family -> field -> value: what the paper uses there, for fields left at None.
    family_defaults: ClassVar[FamilyDefaults] = {}
    # Family -> parts that its `companions` stand behind there.
    family_companions: ClassVar[Mapping[str, tuple[Part, ...]]] = {}

    def __post_init__(self) -> None:
        check_limits(self)

    def __str__(self) -> str:
        return self.name

    def companions(self) -> tuple[Part, ...]:
        """Parts that complete the paper's method where a composition leaves a role open, the
        preferred ones first; what needs something that the given parts do not offer is left out."""
        return ()

    def begin_block(self, canvas: Canvas) -> None:
        """Before a forward, when the window has just been opened: set up what belongs to a block,
        e.g. a schedule.  What is asked before a forward (`wants`, `asks`, `Selector.rests`, ...)
        only reads."""

    @property
    def candidates(self) -> int:
        """How many of the likeliest tokens it reads at each position (`Prediction.top_token`)."""
        return 0

    def wants(self, canvas: Canvas) -> IntArray | None:
        """Positions beyond the window's masks whose predictions it reads, ascending."""
        return None

    def asks(self, canvas: Canvas, positions: IntArray) -> IntArray | None:
        """(n, m) ids whose log-probabilities it reads at ``positions``."""
        return None

    @property
    def bannable(self) -> frozenset[int]:
        """Ids that it may forbid in some steps."""
        return frozenset()

    def bans(self, canvas: Canvas, positions: IntArray) -> Mapping[int, BoolArray]:
        """Id -> (n,) bool: at which of the ``positions`` it may not be proposed in this step."""
        return {}

    def maps(self, layers: int) -> tuple[int, ...]:
        """Which of the ``layers`` decoder layers it reads the attention of: DAWN, which weighs
        positions by who attends to whom, and nobody can tell that from predictions."""
        return ()


class Window(Part):
    """Where the step may commit."""

    role: ClassVar[str] = "window"

    def advance(self, canvas: Canvas) -> None:
        """Before a forward, while something is undecided: make sure the window holds some of it."""
        raise NotImplementedError

    def settle(self, canvas: Canvas, prediction: Prediction) -> None:
        """After a forward: bounds that depend on what the model says."""

    def reconsiders(self, view: View, chosen: BoolArray) -> bool:
        """Whether the window has just grown and the step's commits should wait for that: DCD, whose
        paper decides only once the window is as far as it goes."""
        return False

    def decides(self, canvas: Canvas) -> bool:
        """Whether the window itself says what this step commits, in place of the selectors."""
        return False

    def select(self, view: View) -> BoolArray:
        """(n,) bool over ``view.positions``, in a step that the window `decides`: the first."""
        first: BoolArray = np.arange(len(view.positions)) == 0
        return first


class Transform(Part):
    """What becomes of the predictions before anyone looks at them."""

    role: ClassVar[str] = "transform"

    def apply(self, canvas: Canvas, prediction: Prediction) -> Prediction:
        raise NotImplementedError


class Scorer(Part):
    """How sure the model is: larger commits earlier."""

    role: ClassVar[str] = "scorer"
    tau_low: ClassVar[float] = 0.3  # what scores less is unsure, for parts that leave this open

    def score(self, canvas: Canvas, prediction: Prediction) -> FloatArray:
        raise NotImplementedError


class Selector(Part):
    """Which positions of the view are committed now.

    A selector that ``extends`` adds to what others chose: it does not stand alone in a chain, and
    sees at least one commit before it.
    """

    role: ClassVar[str] = "selector"
    extends: ClassVar[bool] = False
    scheduled: ClassVar[bool] = False  # whether a number of steps is planned

    def rests(self, canvas: Canvas) -> bool:
        """Whether the schedule grants this step nothing, so that no forward is needed."""
        return False

    def select(self, view: View) -> BoolArray:
        """(n,) bool over ``view.positions``: those that no earlier selector has chosen."""
        raise NotImplementedError

    def proposals(self, view: View, chosen: BoolArray) -> tuple[IntArray, FloatArray]:
        """(n,) ids that it commits and their log-probabilities, right where it has ``chosen``:
        what is proposed, unless it says otherwise: R2, which writes what a position said before."""
        return view.prediction.token, view.prediction.logprob


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
    ends: ClassVar[bool] = True  # whether a stop id ends anything

    @property
    def reorders(self) -> bool:
        """Whether `rescore` changes scores."""
        return False

    def rescore(self, view: View) -> FloatArray:
        """Before the step's own commits: the scores as this rule changes them.  A rule that cuts
        by what is proposed (EoTP) remembers it here."""
        return view.score

    def check(self, canvas: Canvas, committed: IntArray, stop_ids: tuple[int, ...]) -> None:
        """After the commits: cut the row or finish it when its text has ended."""
        raise NotImplementedError


class Course(Part):
    """How a step goes, where it is not: choose, commit, look for an end.

    Two questions: what the next forward `feeds` beyond the row as it stands, and how to `decide`
    once that has been seen.  The second is ordinary code over a `turn.Turn`, which has the row,
    what was seen, and a method for each thing that a step may do.  Courses stand inside one
    another: an explorer around a reviser around the selectors.
    """

    @property
    def width(self) -> int:
        """Most branches it feeds at once."""
        return 1

    def feeds(self, canvas: Canvas) -> Feed:
        """What the next forward feeds; it only reads."""
        return THE_ROW

    def decide(self, turn: Any) -> None:
        """Make the step; ``turn.go_on()`` does what it is without this course."""
        raise NotImplementedError


class Reviser(Course):
    """What is taken back, or written differently, once a step has committed.

    One that only takes back offers `CONSTRAINED`: what is written then stays in a format.
    """

    role: ClassVar[str] = "reviser"


@dataclass
class Tried:
    """The branches that the next forward feeds."""

    trials: tuple[Trial, ...] = ()


class Explorer(Course):
    """What is tried first: continuations of a row, fed in one forward (`Turn.try_next`)."""

    role: ClassVar[str] = "explorer"

    def feeds(self, canvas: Canvas) -> Feed:
        trials = canvas.state(Tried).trials
        return Feed(trials) if trials else THE_ROW


class Length(Course):
    """How long the answer is, where that is found while it is written.

    The region begins with `open` positions and never gets more than ``canvas.cap``.  Before the
    first step may come probes: turns that decide nothing.  After a step `resize` names the edits
    of the row; nobody else changes its length.  Positions left of an edit stay where they are.
    """

    role: ClassVar[str] = "length"
    within: ClassVar[bool] = True  # whether blocks that are open change, which no schedule foresees
    moves: ClassVar[bool] = False  # whether decided text may move to the right or to the left
    ends: ClassVar[bool] = True  # whether it needs the end-of-text id
    first: ClassVar[int] = 64  # positions to begin with, where it is not told
    fills: ClassVar[bool] = False  # whether it changes the length of holes in a text

    def open(self, start: int, origin: int, cap: int) -> int:
        """Positions of the region to begin with, which starts at ``start``; blocks are counted
        from ``origin`` on.  By default its field ``initial``, else `first`."""
        initial: int | None = getattr(self, "initial", None)
        return initial or min(cap, self.first)

    def decide(self, turn: Any) -> None:
        turn.go_on()
        if turn.goes_on:
            turn.edits = self.resize(turn.view, turn.committed)

    def resize(self, view: View, committed: IntArray) -> tuple[Edit, ...]:
        """What follows from a step; ``view`` is from before its commits, but for the row."""
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
