"""What a cache is: a rule for what to recompute.

Keys and values of every position lie in one buffer, in logical order.  Each step a cache answers
two questions about one row: which positions to *compute* (feed to the model, rewriting their
slots) and which to *read* (attend to).  Caches are NumPy on one row and see no tensors.

A position decided in this step still holds the key and value of [MASK]: its slot is *pending*
until the token was fed as itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Protocol, Self, TypeVar, dataclass_transform

import numpy as np

from ..core.canvas import BoolArray, Canvas, FloatArray, IntArray
from ..core.capabilities import ALL_LOGITS, BRANCHES, FRESH_LOGITS, Capability
from ..core.errors import ConfigError
from ..core.limits import COUNT, Limits, bounds
from ..core.registry import Registry
from ..core.spec import FamilyDefaults, Info, check_part, fill_open, info, parse_one

# What caches offer: PARTIAL those that answer part of what is asked.  The others serve all of
# it, by computing more where they must.
PARTIAL = frozenset({FRESH_LOGITS})
ALL = PARTIAL | {ALL_LOGITS, BRANCHES}

# How long a plan holds.
STEP, OPEN_BLOCK, SAME_LENGTH = 0, 1, 2

S = TypeVar("S")


@dataclass(slots=True)
class Slots:
    """Freshness of one row's slots.  ``age`` (N,) int64: step of the last computation, -1 never;
    ``pending`` (N,) bool: the stored key and value belong to another token than the present one;
    ``shift``: target t is scored by row t - shift; ``block_length`` of block-causal attention,
    0 for bidirectional; ``decided_first``: whether masks are seen by masks behind them alone
    (WeDLM); ``prefix``: how many of the first positions were computed causally, where what stands
    before the open block is so, else -1; ``layers``: what the cache remembers per lane and layer
    (see `Layer.memory`), ``states`` the rest of what it remembers."""

    age: IntArray
    pending: BoolArray
    shift: int = 0
    block_length: int = 0
    decided_first: bool = False
    prefix: int = -1
    layers: dict[int, dict[Any, Any]] = field(default_factory=dict)
    states: dict[type, Any] = field(default_factory=dict)

    @classmethod
    def empty(
        cls, length: int, shift: int = 0, block_length: int = 0, decided_first: bool = False,
        prefix: int = -1,
    ) -> Self:  # fmt: skip
        pending = np.zeros(length, np.bool_)
        return cls(np.full(length, -1), pending, shift, block_length, decided_first, prefix)

    def fresh(self, length: int) -> Self:
        """The same for ``length`` slots of which nothing has been computed."""
        prefix = min(self.prefix, 0)
        return self.empty(length, self.shift, self.block_length, self.decided_first, prefix)

    def resize(self, length: int) -> None:
        """Add slots at the end of which nothing has been computed, or drop some."""
        missing = max(0, length - len(self.age))
        self.age = np.pad(self.age[:length], (0, missing), constant_values=-1)
        self.pending = np.pad(self.pending[:length], (0, missing))

    def state(self, kind: type[S]) -> S:
        """What the cache remembers of this row: an object of its own class ``kind``, made without
        arguments when it is first asked for."""
        if kind not in self.states:
            self.states[kind] = kind()
        state: S = self.states[kind]
        return state

    def final(self, canvas: Canvas) -> int:
        """How many of the first positions hold keys and values that nothing can change any more,
        where attention is causal or block-causal: they were computed after the last decision that
        they depend on.  Whole blocks; 0 for bidirectional attention."""
        if self.prefix >= 0:
            return min(self.prefix, canvas.length)
        if not (self.block_length or self.decided_first):
            return 0
        block = self.block_length or 1
        live = slice(canvas.length // block * block)
        latest = np.maximum.accumulate(canvas.commit_step[live])[block - 1 :: block].repeat(block)
        final = (self.age[live] > latest) & ~self.pending[live] & ~canvas.masked[live]
        count = live.stop if final.all() else int(final.argmin())
        return count - count % block

    def computed(self, positions: IntArray, step: int) -> None:
        self.age[positions] = step
        self.pending[positions] = False

    def waiting(self, length: int) -> IntArray:
        """The pending positions among the first ``length``, ascending."""
        return self.pending[:length].nonzero()[0]

    def changed(self, positions: IntArray) -> None:
        """Tokens at ``positions``, one or more, were decided or taken back."""
        self.pending[positions] = True
        if self.prefix > 0:
            self.prefix = min(self.prefix, int(positions.min()))

    def end(self, canvas: Canvas, targets: IntArray) -> int:
        """Where the last block ends that is asked about, counted from the canvas's origin."""
        return min(canvas.block_at(int(targets[-1]), self.block_length)[1], canvas.length)


@dataclass(frozen=True, slots=True)
class Plan:
    """One row's step: ``compute`` ascending positions; ``read`` ascending positions or None for
    every live slot; ``refresh`` whether everything is recomputed; ``answers`` the targets it
    serves, None for all that is asked; ``asks`` further targets that the engine itself wants.

    ``until``: how long it holds, if nothing outside ``compute`` changes meanwhile: for this `STEP`,
    while a block is open (`OPEN_BLOCK`), or while the text has the `SAME_LENGTH`.

    ``borders``: ascending positions; what is computed reads only what lies left of the next border
    to its right, beside what the model itself allows: D2F, whose checkpoints were trained
    so, in one forward for several blocks.  ``floor``: where logits are shifted, the first row that
    scores; a target whose row lies left of it is scored by it.  ``shift``: in place of the model's,
    where the causal model is asked for what stands next."""

    compute: IntArray
    read: IntArray | None = None
    refresh: bool = False
    answers: IntArray | None = None
    asks: IntArray | None = None
    borders: IntArray | None = None
    floor: int = 0
    until: int = STEP
    shift: int | None = None

    def rows(self, targets: IntArray, shift: int) -> IntArray:
        """The row that scores each target, ascending."""
        shift = shift if self.shift is None else self.shift
        return np.maximum(targets - shift, self.floor) if shift else targets

    def pieces(self, length: int) -> list[tuple[IntArray, IntArray | None]]:
        """What is computed, and what it reads, cut at the borders."""
        if self.borders is None:
            return [(self.compute, self.read)]
        read = np.arange(length) if self.read is None else self.read
        ends = np.append(self.borders[self.borders < length], length)
        cuts = np.searchsorted(self.compute, ends)
        return [
            (self.compute[low:high], read[read < end])
            for low, high, end in zip([0, *cuts[:-1]], cuts, ends, strict=True)
            if low < high
        ]


class Layer(Protocol):
    """One row at one decoder layer.  ``stream``: the positions whose hidden states have come here;
    ``memory``: what the cache remembers of the row, apart for each lane of a guided row."""

    index: int
    stream: IntArray
    memory: dict[Any, Any]

    def value_similarity(self, positions: IntArray) -> FloatArray:
        """Before the layer: cosine between the stored values of ``positions`` and their fresh
        ones, which replace them, over all heads; (n,)."""

    def attention(self, queries: IntArray) -> FloatArray:
        """After the attention: what computed positions attend to, mean over heads, (n, N)."""


@dataclass(frozen=True)
class Cache:
    """A caching method.  ``stores`` is False when nothing outlives the step; ``needs`` is what it
    needs of the sampler, ``offers`` what it offers to one.  ``branches_slide``: branches have
    windows and plans of their own (see `branch`).  ``survives_growth``: when a text becomes longer
    at its end, what is stored of it stays good; other caches compute it anew.  ``layerwise`` caches
    are also asked at every layer and ``keeps`` says which hidden states are stored for them: the
    "input" of each layer, or the "change" it makes."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    arxiv: ClassVar[str] = ""
    needs: ClassVar[frozenset[Capability]] = frozenset()
    offers: ClassVar[frozenset[Capability]] = PARTIAL
    stores: ClassVar[bool] = True
    branches_slide: ClassVar[bool] = False
    survives_growth: ClassVar[bool] = False
    # Whether what is stored of `Slots.final` positions is what any text that begins like this one
    # stores there, so that it may be kept for those.
    exact: ClassVar[bool] = False
    layerwise: ClassVar[bool] = False
    keeps: ClassVar[str | None] = None
    # Family -> field -> value: what the paper uses there, for fields left at None.
    family_defaults: ClassVar[FamilyDefaults] = {}
    limits: ClassVar[Limits] = {}  # what values its arguments may take

    def __post_init__(self) -> None:
        check_part(self)

    @property
    def recompute_pending(self) -> bool:
        """Whether a changed position is recomputed in the very next step; else by the next
        refresh, as some official code has it."""
        return True

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        """What to compute and read in this step, whose predictions are wanted at ``targets``.

        The engine asks once per step.  It adds the rows that score the targets and, for a
        cache with `recompute_pending`, what is pending.
        """
        raise NotImplementedError

    def opening(self, slots: Slots, low: int) -> Plan:
        """The causal pass over all that stands before a block which begins at ``low``, whose first
        token it predicts; one position at least."""
        first = min(max(slots.prefix, 0), low - 1) if self.stores else 0
        return Plan(np.arange(first, low), np.arange(low), refresh=not self.stores, shift=1)

    def branch(self, fork: Canvas, plan: Plan) -> Plan:
        """What a branch computes and reads, by its row's ``plan``; only with `branches_slide`."""
        return plan

    def before_layer(self, canvas: Canvas, slots: Slots, layer: Layer) -> IntArray | None:
        """The positions that this layer computes, ascending; None: the whole stream.  It reads what
        the plan says.

        Positions of the stream that are not computed need `keeps` "change", positions computed
        that are not in the stream need "input".
        """
        return None

    def after_attention(self, canvas: Canvas, slots: Slots, layer: Layer) -> None:
        """A chance to look at the attention of a layer."""


C = TypeVar("C", bound=Cache)
CACHES: Registry[Cache] = Registry("cache", Cache)
CacheLike = str | Cache


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def register(name: str, **facts: object) -> Callable[[type[C]], type[C]]:
    """Class decorator: a frozen dataclass, known by ``name``, on which ``facts`` are set."""
    return CACHES.part(name, **facts)


def full_plan(canvas: Canvas) -> Plan:
    """Compute all live positions: exact."""
    return Plan(np.arange(canvas.length), refresh=True)


def span(canvas: Canvas, low: int, high: int) -> IntArray:
    """The live positions of ``[low, high)``."""
    return np.arange(max(0, low), min(high, canvas.length))


def complete_plan(plan: Plan, targets: IntArray, slots: Slots, pending: IntArray) -> Plan:
    """The plan with every row added that scores a target (row t - shift for target t), and with
    the ``pending`` positions; what is added is also read, and for this step alone."""
    if plan.refresh:
        return plan
    rows, compute = plan.rows(targets, slots.shift), plan.compute
    if not (_within(compute, rows) and _within(compute, pending)):
        compute = np.union1d(compute, np.concatenate([rows, pending]))
    if len(compute) == len(plan.compute):
        return plan
    if plan.read is None:
        return replace(plan, compute=compute, until=STEP)
    added = np.setdiff1d(compute, plan.compute, assume_unique=True)
    return replace(plan, compute=compute, read=np.union1d(plan.read, added), until=STEP)


def _within(run: IntArray, positions: IntArray) -> bool:
    """Whether ascending ``positions`` surely lie in ``run``, which must have no gap."""
    if not positions.size:
        return True
    gapless = run.size > 0 and run.size == run[-1] - run[0] + 1
    return bool(gapless and run[0] <= positions[0] and positions[-1] <= run[-1])


def check(plan: Plan, canvas: Canvas, slots: Slots) -> None:
    """Refuse a plan that reads slots nobody has written: a defect of the cache."""
    age = slots.age[: canvas.length] if plan.read is None else slots.age[plan.read]
    if plan.refresh or age.size == 0 or age.min() >= 0:
        return
    read = np.arange(canvas.length) if plan.read is None else plan.read
    unwritten = np.setdiff1d(read[age < 0], plan.compute)
    if unwritten.size:
        raise ConfigError(f"the cache reads position {int(unwritten[0])} before computing it")


@dataclass(slots=True)
class Clock:
    """When a row was last refreshed: in which ``block``, at which step or block step (``start``,
    where counting begins again), with how many masks left.  ``block`` None: never."""

    block: int | None = None
    start: int = 0
    masks: int = 0


@dataclass(frozen=True)
class Refreshing(Cache):
    """A cache that recomputes everything in its first step, then every ``refresh_every`` steps
    (1 = always, i.e. exact) or after ``refresh_after`` committed tokens; ``inf`` means never, None
    what the paper uses for the model's family, which is never where the cache names nothing.

    Steps are counted on a fixed clock: a refresh falls on the first forward at or after each
    multiple of ``refresh_every``.  A refresh for another reason restarts the clock.  Where several
    tokens are committed per step, ``refresh_after`` is the steadier measure.
    """

    limits = bounds(refresh_every=COUNT, refresh_after=COUNT)

    refresh_every: float | None = None
    refresh_after: float | None = None

    by_block: ClassVar[bool] = False  # refresh at every block opening and count from there

    @property
    def holds(self) -> int:
        """How long the plan of a step holds that refreshes nothing."""
        clocks = self.refresh_every is not None or self.refresh_after is not None
        return STEP if clocks or not self.by_block else OPEN_BLOCK

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        due = self.due(canvas, slots)
        return full_plan(canvas) if due else self.between(canvas, slots, targets)

    def between(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        """What a step computes and reads that refreshes nothing."""
        raise NotImplementedError

    def due(self, canvas: Canvas, slots: Slots) -> bool:
        """Whether this step refreshes; remembers when it does."""
        block, step = self._time(canvas)
        clock = slots.state(Clock)
        start = clock.start if block == clock.block else 0
        elapsed = step - start
        past = elapsed - elapsed % self.refresh_every if self.refresh_every else 0  # whole phases
        if block != clock.block or past:
            self.restart(canvas, slots, start + int(past))
            return True
        commits = clock.masks - int(canvas.masked.sum())
        if self.refresh_after is not None and commits >= self.refresh_after:
            self.restart(canvas, slots, step)
            return True
        return False

    def restart(self, canvas: Canvas, slots: Slots, start: int | None = None) -> None:
        """Count steps from ``start`` (default: this step) and commits from now on."""
        block, step = self._time(canvas)
        start = step if start is None else start
        slots.states[Clock] = Clock(block, start, int(canvas.masked.sum()))

    def _time(self, canvas: Canvas) -> tuple[int, int]:
        return (canvas.block, canvas.block_step) if self.by_block else (0, canvas.step)


def available() -> list[Info]:
    """Every registered cache, by name."""
    return [info(CACHES[name], offers=CACHES[name]().offers) for name in sorted(CACHES)]


def compose(cache: CacheLike, family: str = "llada") -> Cache:
    """A cache from its name, e.g. ``"dual"`` or ``"dual(refresh_every=4)"``, or an object; fields
    that it leaves open are set to what its paper uses for models of ``family``."""
    if isinstance(cache, Cache):
        return fill_open(cache, family)
    if not isinstance(cache, str):
        raise ConfigError(f"a cache is a name or an object of one, not {cache!r}")
    return _named(cache, family, CACHES.version)


@lru_cache(maxsize=64)
def _named(cache: str, family: str, version: int) -> Cache:
    """A cache keeps nothing of a text itself: all that name one alike share it."""
    return fill_open(parse_one(cache, CACHES), family)
