"""The loop: rows join, one forward per step for all of them, decisions out, rows leave.

The engine knows canvases, recipes, a cache and a model.  It knows neither text nor tokenizers.
What it guarantees for every method: a step that was paid for decides something, the mask token is
never proposed, every forward is counted, rows do not influence one another.  A row's tokens, commit
order, forwards and computed positions are those of decoding it alone, whatever joins, leaves or
fails meanwhile.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..cache import Cache, Slots
from ..core.canvas import Canvas
from ..core.errors import ConfigError
from ..models import DiffusionModel
from ..samplers import THE_ROW
from .forward import Forward
from .memory import unless_out_of_memory
from .prefixes import Prefixes, failures_are_logged, weights_of
from .recipe import MaskedRecipe, RowOptions, check_recipe
from .rows import Job, Row, Step
from .turn import complete, jobs_of, opening_of, plan_of, settle
from .work import Work

CPU_BATCH = 512  # a processor's products get no faster beyond; activations then leave its cache


class Engine(Work[Row, Step]):
    """Decodes canvases, which join by `admit` and leave when they are finished or by `drop`.

    ``slots``: positions whose keys and values the pool holds; None (default) lets it grow with
    the rows that are admitted, up to ``most`` (None: without bound).  A cache that stores nothing
    needs no pool, and then only ``max_batch_size`` bounds what is admitted, the most
    rows at a time.  ``max_batch_tokens``: most token positions of one forward; more are cut into
    micro-batches of whole rows (default: 512 on a CPU, else without bound).  ``cuda_graphs``: see
    `dllm.GenerationConfig`.

    One engine may be called from several threads, one at a time: calls wait for one another.  The
    model may be shared by any number of engines.
    """

    def __init__(
        self, model: DiffusionModel, cache: Cache, *, slots: int | None = None,
        most: int | None = None, max_batch_size: int | None = None,
        max_batch_tokens: int | None = None, cuda_graphs: bool = False,
    ) -> None:  # fmt: skip
        if max_batch_tokens is None and model.device.type == "cpu":
            max_batch_tokens = CPU_BATCH
        super().__init__(
            model, max_batch_size, slots if most is None and slots else most, max_batch_tokens
        )
        self.cache, self.cache_name, self.leaves_rows_changed = cache, cache.name, cache.layerwise
        self.forward = Forward(model, cache, cuda_graphs)
        self.overlaps = model.device.type != "cpu" and not cache.layerwise
        self.prefixes: Prefixes[tuple[int, int]] = Prefixes(self._free)  # first slot, how many
        self._slots = slots or 0
        self._checked: dict[int, tuple[MaskedRecipe, RowOptions]] = {}

    @property
    def forward_seconds(self) -> float:
        return self.forward.seconds

    @property
    def stores(self) -> bool:
        return self.cache.stores

    @property
    def cache_bytes(self) -> int:
        buffer = self.forward.buffer  # empty as a Cache of transformers, and so false
        return 0 if buffer is None else buffer.nbytes

    def figures(self, row: Row) -> dict[str, Any]:
        return {
            "sampler": row.recipe.sampler.spec, "cache": self.cache.name,
            "cached_tokens": row.reused,
        }  # fmt: skip

    # -- rows join and leave --------------------------------------------------------------------

    def admit(self, canvas: Canvas, recipe: MaskedRecipe, held: bool = False) -> Row | None:
        """Take a row in; None when there is no room for it now.

        ``held`` rows stay when they are finished, until `drop`.  A canvas with nothing to decide
        is finished at once and takes no room.  Raises `ConfigError` for parts that do not go
        together, and for a row that no engine of this size can ever hold.
        """
        with self._lock:
            options = self._options(recipe)
            block_length = self.model.facts.block_length or 0
            kind = self.model.facts.mask_kind
            if block_length:
                canvas.origin = canvas.prompt_length if kind == "causal_prefix" else 0
            if recipe.format is not None:
                positions, tokens = recipe.format.settled(canvas, canvas.end)
                canvas.commit(positions, tokens, np.zeros(len(positions), np.float32))
            length = len(canvas.tokens)
            slots = Slots.empty(
                length, self.forward.shift, block_length, kind == "decided_first",
                0 if kind == "causal_prefix" else -1,
            )  # fmt: skip
            row = Row(canvas, recipe, options, slots, canvas.fork(), capacity=length, held=held)
            if complete(canvas) and not held:
                return row
            self.must_fit(recipe, length)
            return row if self._join(row) else None

    def replace(self, row: Row, canvas: Canvas, kept: int) -> None:
        """Give a held row another text of at most its capacity.  Keys and values of the first
        ``kept`` positions stay, those behind are stale; nothing is pending.  With ``kept`` 0 the
        cache forgets the row altogether."""
        if len(canvas.tokens) > row.capacity:
            raise ConfigError(
                f"the row holds {row.capacity} positions, the text has {len(canvas.tokens)}: "
                "admit it as a row of its own"
            )
        with self._lock:
            row.canvas, row.feed, row.previous, row.jobs = canvas, THE_ROW, None, []
            row.drop_plan()
            row.soft, row.slots.prefix = None, min(row.slots.prefix, kept)
            if not kept:
                row.slots = row.slots.fresh(row.capacity)
            row.slots.age[kept:] = -1
            row.slots.pending[:] = False

    def close(self) -> None:
        """Drop every row and give the memory of keys and values back."""
        with self._lock:
            super().close()
            if self.prefixes.kept:
                self.prefixes.shrink(0)
            self.forward.release()
            self._checked.clear()

    def check(self, recipe: MaskedRecipe) -> None:
        self._options(recipe)

    def _options(self, recipe: MaskedRecipe) -> RowOptions:
        """What a recipe asks of the statistics; recipes are checked when they are first met."""
        known = self._checked.get(id(recipe))
        if known is None:
            check_recipe(recipe, self.cache, self.model)
            known = recipe, RowOptions.of(recipe, self.model)
            if len(self._checked) > 1024:  # a server meets a new one with every request
                self._checked.clear()
            self._checked[id(recipe)] = known
        return known[1]

    def _allot(self, row: Row) -> bool:
        if not self.cache.stores:
            return True
        if self.forward.buffer is None:
            self.forward.allot(self._slots or row.size, self.positions or 1 << 62)
        if self.positions is not None and self.prefixes.kept:
            self.prefixes.shrink(self.positions - self.used - row.size)
        assert self.forward.buffer is not None  # growing takes both sizes for a moment
        take = partial(self.forward.buffer.allocate, row.size)
        base = self.prefixes.make_room(take) if self.prefixes.kept else take()
        if base is None and not self.live and self.forward.buffer.extents.used:
            self.forward.release()  # a text could not give its slots back
            return self._allot(row)
        if base is None:
            return False
        row.base = base
        try:
            if self.prefixes.budget and row.lanes == 1:
                self._reuse(row)
        except BaseException:
            row.base = None
            self._free((base, row.size))
            raise
        return True

    # -- prefixes that stay ---------------------------------------------------------------------

    def prefix_cache_tokens(self, tokens: int | None) -> None:
        with self._lock:
            if self.cache.exact:
                self.prefixes.allow(tokens)
                return
            exact = {"block_causal": "block", "causal_prefix": "block", "decided_first": "wedlm"}
            own = exact.get(self.model.facts.mask_kind)
            if own and tokens:
                raise ConfigError(
                    f"cache={self.cache.name!r} stores nothing for other texts to go on from: pass "
                    f"cache={own!r}, or leave prefix_cache_tokens out"
                )
            if tokens:
                raise ConfigError(
                    f"{self.model.name} computes the keys and values of a prompt anew for every "
                    "text, because they depend on what follows: leave prefix_cache_tokens out"
                )

    def _reuse(self, row: Row) -> None:
        """Give a row the keys and values of what its prompt has in common with a kept text."""
        row.weights, row.reused = self._weights(row), 0
        begin = row.canvas.tokens[: row.canvas.start + 1]
        prefix = row.slots.prefix >= 0
        size = 1 if prefix else row.slots.block_length or 1
        found = self.prefixes.find(begin, row.weights, block=size)
        if found is not None:
            (base, _), row.reused = found
            assert self.forward.buffer is not None and row.base is not None
            at = torch.arange(row.reused, device=self.model.device)
            self.forward.buffer.move(base + at, row.base + at)
            row.slots.age[: row.reused] = 0
            if prefix:
                row.slots.prefix = row.reused

    def _weights(self, row: Row) -> object:
        return weights_of(self.model.hf, row.recipe.config.cache_salt)

    def _kept(self, row: Row) -> int:
        """How many of the slots of a row that leaves are kept for texts that begin like it."""
        whole = row.canvas.finished and row.error is None and not row.planned
        if row.weights is None or not whole or row.weights != self._weights(row):
            return 0
        count = row.slots.final(row.canvas)
        assert row.base is not None
        tokens = row.canvas.tokens[:count].copy()
        return count * self.prefixes.keep((row.base, count), tokens, row.weights)

    def _free(self, kept: tuple[int, int]) -> None:
        assert self.forward.buffer is not None
        self.forward.buffer.free(*kept)

    # -- rows whose texts become longer ---------------------------------------------------------

    def _outgrown(self, row: Row) -> bool:
        """Whether its text has become longer than its slots, so that it waits for more of them."""
        return self.cache.stores and row.canvas.length > row.capacity

    def plan(self, rows: Sequence[Row] | None = None) -> list[Row]:
        with self._lock:
            self._make_room()
            return super().plan(rows)

    def _make_room(self) -> None:
        """Give rows whose texts have become longer more slots, in the order of their admission.
        Where nobody can go on, the youngest of them begins anew when another row has left."""

        def waiting() -> list[Row]:
            asked = [row for row in self.live if row.error is None]
            asked.sort(key=lambda row: row.number)
            return [row for row in asked if self._guarded(row, partial(self._outgrown, row))]

        while outgrown := waiting():
            for row in outgrown:
                self._enlarge(row)
            outgrown = waiting()
            if any(row not in outgrown and not row.canvas.finished for row in self.live):
                return
            if len(self.live) > 1 and outgrown:
                self._take_back(outgrown[-1])
            elif outgrown:
                self._fail(outgrown[0], ConfigError(
                    f"the text needs {outgrown[0].lanes * outgrown[0].canvas.length} positions of "
                    f"keys and values, the pool holds {self.positions}: pass a smaller "
                    "max_new_tokens, or raise max_positions"
                ))  # fmt: skip
                return

    def _enlarge(self, row: Row) -> None:
        """Twice the slots, at most what the text may ever need, or those it needs now."""
        buffer, canvas = self.forward.buffer, row.canvas
        assert buffer is not None and row.base is not None
        most = max(canvas.length, canvas.start + canvas.cap)
        for size in (min(2 * row.capacity, most), canvas.length):
            if size < canvas.length:
                continue
            owned = row.base, row.capacity, size, row.lanes
            enlarge = partial(buffer.enlarge, *owned)
            base = unless_out_of_memory(partial(self.prefixes.make_room, enlarge))
            if base is not None:
                row.base, row.capacity = base, size
                row.drop_plan()
                return

    def _leave(self, row: Row) -> None:
        base, buffer, kept = row.base, self.forward.buffer, 0
        if base is not None and buffer is not None and self.prefixes.budget:
            with failures_are_logged():
                kept = self._kept(row)
        row.base, row.jobs, row.previous, row.soft = None, [], None, None
        row.drop_plan()
        if base is not None and buffer is not None and kept < row.size:
            buffer.free(base + kept, row.size - kept)

    def _shrink(self) -> None:
        """Where the pool itself is what does not fit, make a smaller one."""
        self.prefixes.shrink(0)
        buffer = self.forward.buffer
        if buffer is not None and not buffer.complete:
            self.forward.allot(max(1, sum(row.size for row in self.live)), self.positions)
            for row in self.live:
                assert self.forward.buffer is not None
                row.base = self.forward.buffer.allocate(row.size)
                row.drop_plan()

    # -- steps ----------------------------------------------------------------------------------

    def run(self, canvases: Iterable[Canvas], recipe: MaskedRecipe) -> Iterator[list[Step]]:
        """Decode canvases from beginning to end, as many at a time as there is room for; yields
        what happened after every step.  A generator that is closed leaves nothing behind."""
        left, mine = deque(canvases), list[Row]()
        try:
            while left or any(not row.canvas.finished for row in mine):
                mine = [row for row in mine if not row.canvas.finished]
                while left and (row := self.admit(left[0], recipe)) is not None:
                    left.popleft()
                    mine.append(row)
                steps = self.step(mine)
                if steps:
                    yield steps
                for row in mine:
                    if row.error is not None:
                        raise row.error
        finally:
            for row in mine:
                self.drop(row)

    def _plan(self, rows: list[Row]) -> None:
        opening = self.model.family.prefix_predicts

        def plan(row: Row) -> None:
            if not self._outgrown(row):
                row.jobs = (opening and opening_of(row, self.cache)) or jobs_of(row, self.cache)

        for row in rows:
            self._guarded(row, partial(plan, row))

    def _forward(self, rows: list[Row]) -> Callable[[], Iterator[Any]]:
        counts = [len(row.jobs) for row in rows]
        flight = self.forward.launch([job for row in rows for job in row.jobs])

        def answers() -> Iterator[Any]:
            found = iter(flight.wait())
            return ([next(found) for _ in range(count)] for count in counts)

        return answers

    def _settle(self, row: Row, answer: Any) -> Step:
        return settle(row, answer, self.cache, self.forward.buffer)

    def scores(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Raw logits (n, V) of what is undecided in each row's window; decides nothing."""
        with self._lock:
            jobs = []
            for row in rows:
                plan, targets = plan_of(row, row.canvas, self.cache, row.canvas.masks())
                jobs.append(Job(row, row.canvas, plan, targets))
            scored = self.forward.logits(jobs)
            for job in jobs:
                job.row.slots.computed(job.plan.compute, job.canvas.step)
                job.canvas.nfe += 1
                job.canvas.computed += job.size
            return scored
