"""A row in the engine, and what it feeds in one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..cache import Cache, Plan, Slots
from ..core.canvas import Canvas, Edit, IntArray
from ..samplers import NOTHING, THE_ROW, Feed, Prediction
from .recipe import MaskedRecipe, RowOptions
from .visibility import Piece
from .work import Row as AnyRow
from .work import Step as AnyStep


@dataclass(slots=True, eq=False)
class Row(AnyRow):
    """A canvas in the engine: how it is decoded, the freshness of its slots, where they lie, the
    branches its next forward feeds, what is kept of its last distributions, and vectors that it
    feeds beside its tokens.

    A guided row has two lanes: as it is, and with the given text masked.  Branches have lanes of
    their own, which hold the same keys and values between steps; masks fed again have the last.
    Each lane owns ``capacity`` slots, one after the other from ``base`` on.  ``jobs`` is the
    planned step that has not run yet; ``same_as_before`` that of the last step, where the next one
    feeds the same positions, and ``open`` says that its window has something undecided.  ``fresh``
    is the canvas as it was admitted, from which a row that gave its memory back starts again.
    ``weights``: those of its keys and values, where these may be kept for other texts; ``reused``:
    how many of its first positions it has from one.
    """

    recipe: MaskedRecipe
    options: RowOptions
    slots: Slots
    fresh: Canvas
    base: int | None = None
    capacity: int = 0
    feed: Feed = THE_ROW
    previous: tuple[IntArray, torch.Tensor] | None = None
    soft: "Soft | None" = None
    jobs: list["Job"] = field(default_factory=list)
    same_as_before: list["Job"] | None = None
    open: bool = False
    weights: object = None
    reused: int = 0

    @property
    def lanes(self) -> int:
        """Lanes it owns slots for."""
        return self.recipe.owned

    @property
    def size(self) -> int:
        return self.lanes * self.capacity

    @property
    def cost(self) -> int:
        jobs = self.jobs
        return jobs[0].size if len(jobs) == 1 else sum([job.size for job in jobs])

    @property
    def planned(self) -> bool:
        return bool(self.jobs)

    @property
    def order(self) -> tuple[int, ...]:
        """Rows of equal shape, in the order of their slots: attention takes them as one tensor."""
        return self.cost, self.capacity, self.base or 0, self.number

    def lane(self, number: int) -> int:
        """The first slot of one of its lanes in the buffer."""
        return (self.base or 0) + number * self.capacity

    def forks(self) -> list[Canvas]:
        """The canvases to feed: the row itself, or a copy per trial."""
        if not self.feed.branches:
            return [self.canvas]
        forks = []
        for trial in self.feed.branches:
            fork = self.canvas.fork()
            fork.commit(trial.positions, trial.tokens, trial.logprobs)
            forks.append(fork)
        return forks

    def drop_plan(self) -> None:
        """Whoever moves, changes or restarts the row says that its last plan holds no more."""
        self.same_as_before, self.open = None, False

    def edit(self, edits: Sequence[Edit], cache: Cache) -> None:
        """Change the length of the text.  What is cut off at its end takes its slots along; after
        any other edit the cache begins anew, unless it `Cache.survives_growth` with the text."""
        canvas, at_end = self.canvas, True
        self.drop_plan()
        for edit in edits:
            at_end &= edit.at + edit.removed == canvas.length
            canvas.edit(edit)
        if at_end and (cache.survives_growth or not any(edit.added for edit in edits)):
            self.slots.resize(canvas.length)
        else:
            self.slots, self.previous = self.slots.fresh(canvas.length), None

    def restart(self) -> None:
        self.canvas.become(self.fresh.fork())
        self.capacity = len(self.canvas.tokens)
        self.slots = self.slots.fresh(self.capacity)
        self.feed, self.previous, self.jobs, self.soft = THE_ROW, None, [], None
        self.drop_plan()
        self.restarts += 1
        self.inexact = False


@dataclass(frozen=True, slots=True, eq=False)
class Soft:
    """What a row feeds beside its tokens: ``vectors`` (n, d) for ascending ``positions`` (n,)."""

    positions: IntArray
    vectors: torch.Tensor


@dataclass(slots=True, eq=False)
class Layout:
    """What a job feeds in every step until its plan changes: where its tokens stand in the row, the
    ``positions`` and ``slots`` (n,), and the ``pieces`` of attention, with other keys in layers of
    a ``sliding`` window; the queries from ``open`` on are of the open block."""

    where: slice | IntArray
    count: int
    first: int
    positions: IntArray
    slots: IntArray | None
    pieces: list[Piece]
    sliding: list[Piece]
    open: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """What one branch of one row wants of this step.  ``lane``: the first of the row's lanes that
    hold its keys and values.  ``masks``: positions that are fed once more, as [MASK] tokens that
    see every token but the one at their own position.  ``wanted``: those of the targets that the
    sampler asked for, None for all; the cache alone sees the others.  ``ids``: part of the sampler
    -> (targets, m) ids whose log-probabilities it reads.  ``ordered``: positions that attend as if
    blocks had one position.  ``verifies``: its canvas holds drafts, which masks fed again judge."""

    row: Row
    canvas: Canvas
    plan: Plan
    targets: IntArray
    lane: int = 0
    masks: IntArray = field(default_factory=lambda: NOTHING)
    wanted: IntArray | None = None
    ids: Mapping[str, IntArray] = field(default_factory=dict)
    ordered: tuple[int, int] = (0, 0)
    verifies: bool = False
    options: RowOptions = field(init=False)
    up: dict[str, Any] = field(default_factory=dict)  # what goes up for it alone, by name
    logprobs: torch.Tensor | None = None  # (targets, V), where the sampler compares steps
    soft: "Soft | None" = None  # what the row may feed beside its tokens next
    opening: int | None = None  # the block that opens behind a causal pass, which this is
    work: int | None = None  # positions computed per layer on average, where layers differ
    layout: Layout | None = None  # what it feeds, as long as that stays
    extent: tuple[int, tuple[int, int]] = field(init=False)  # length and window it was planned for
    size: int = field(init=False)  # token positions it feeds to the model
    own: bool = field(init=False)  # whether it has numbers of its own, see `RowOptions.own`

    def __post_init__(self) -> None:
        self.size = len(self.plan.compute) * self.lanes + len(self.masks)
        self.extent, sampler = (self.canvas.length, self.canvas.window), self.row.recipe.sampler
        self.options = self.row.options
        drawn = sampler.drawers[0].draws(self.canvas) if sampler.drawers else None
        if drawn is not None:
            self.options = self.options.at(drawn)
        self.own = bool(self.ids) or self.verifies or self.options.own

    @classmethod
    def of(
        cls, row: Row, canvas: Canvas, plan: Plan, targets: IntArray, ids: Mapping[str, IntArray],
        lane: int, ordered: tuple[int, int],
    ) -> "Job":  # fmt: skip
        """The job of a branch whose sampler reads ``targets``, and of all positions the ``ids``."""
        both = targets if plan.asks is None else np.union1d(targets, plan.asks)
        wanted = None if plan.asks is None else np.searchsorted(both, targets)
        if ids:
            ids = {name: every[both] for name, every in ids.items()}
        return cls(row, canvas, plan, both, lane, NOTHING, wanted, ids, ordered)

    @property
    def lanes(self) -> int:
        """Lanes of this branch: two where the row is guided."""
        return self.row.recipe.lanes

    @property
    def cost(self) -> int:
        """Token positions that the model computed for it."""
        return self.size if self.work is None else self.work

    @property
    def asked(self) -> IntArray:
        """Positions of the hidden rows that meet the head."""
        return np.concatenate([self.targets, self.masks]) if self.masks.size else self.targets

    def base(self, lane: int) -> int:
        """The first slot of one of its lanes in the buffer."""
        return self.row.lane(self.lane + lane)


@dataclass(slots=True, kw_only=True, eq=False)
class Step(AnyStep):
    """What one step did to one row: its plan, and what the model predicted."""

    plan: Plan
    prediction: Prediction

    @property
    def proposals(self) -> dict[int, int]:
        p, drawn = self.prediction, self.canvas.mask_id >= 0
        # with uniform noise it is the likeliest tokens that a canvas ends as
        tokens = p.token if drawn or p.top_token is None else p.top_token[:, 0]
        return dict(zip(p.positions.tolist(), tokens.tolist(), strict=True))
