"""The loop: rows join, one forward per step for all of them, decisions out, rows leave.

The engine knows canvases, recipes, a cache and a model.  It knows neither text nor tokenizers.
What it guarantees for every method: a step that was paid for decides something, the mask token is
never proposed, every forward is counted, rows do not influence one another.  A row's tokens, commit
order, forwards and computed positions are those of decoding it alone, whatever joins, leaves or
fails meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from ..cache import Cache, Slots
from ..canvas import Canvas
from ..errors import ConfigError, OutOfMemoryError
from ..models import DiffusionModel
from .forward import Forward, is_out_of_memory, step_size
from .recipe import Options, Recipe, check_recipe
from .rows import Job, Row, Step
from .turn import complete, jobs_of, plan_row, settle

CPU_BATCH = 512  # a processor's products get no faster beyond; activations then leave its cache


class Engine:
    """Decodes canvases, which join by `admit` and leave when they are finished or by `drop`.

    ``slots``: positions whose keys and values the pool holds; None (default) lets it grow with
    the rows that are admitted, up to ``most`` (None: without bound).  A cache that stores nothing
    needs no pool, and then only ``max_rows`` bounds what is admitted.  ``max_rows``: most rows at
    a time.  ``max_batch_tokens``: most token positions of one forward; more are cut into
    micro-batches of whole rows (default: 512 on a CPU, else without bound).  ``cuda_graphs``,
    ``compile``: see `dllm.GenerationConfig`.

    One engine may be called from several threads, one at a time: calls wait for one another.  The
    model may be shared by any number of engines.
    """

    def __init__(
        self,
        model: DiffusionModel,
        cache: Cache,
        *,
        slots: int | None = None,
        most: int | None = None,
        max_rows: int | None = None,
        max_batch_tokens: int | None = None,
        cuda_graphs: bool = False,
        compile: bool = False,
    ) -> None:
        self.model, self.cache = model, cache
        if max_batch_tokens is None and model.device.type == "cpu":
            max_batch_tokens = CPU_BATCH
        self.max_rows, self.max_batch_tokens = max_rows, max_batch_tokens
        self.forward = Forward(model, cache, cuda_graphs, compile)
        self.live: list[Row] = []
        self._slots, self._most = slots or 0, slots if most is None and slots else most
        self._waiting: deque[Row] = deque()  # rows that gave their memory back
        self._room_again = False
        self._admitted = 0
        self._checked: dict[int, tuple[Recipe, Options]] = {}
        self._lock = threading.RLock()

    @property
    def forwards(self) -> int:
        """Forwards so far, for however many rows."""
        return self.forward.count

    @property
    def cache_bytes(self) -> int:
        """Memory of the keys and values that are held."""
        buffer = self.forward.buffer  # empty as a Cache of transformers, and so false
        return 0 if buffer is None else buffer.nbytes

    @property
    def used(self) -> int:
        """Positions of the pool that rows own."""
        return sum(row.size for row in self.live) if self.cache.stores else 0

    @property
    def positions(self) -> int | None:
        """Positions that the pool may hold, None without bound."""
        return self._most

    # -- rows join and leave --------------------------------------------------------------------

    def admit(self, canvas: Canvas, recipe: Recipe, held: bool = False) -> Row | None:
        """Take a row in; None when there is no room for it now.

        ``held`` rows stay when they are finished, until `drop`.  A canvas with nothing to decide
        is finished at once and takes no room.  Raises `ConfigError` for parts that do not go
        together, and for a row that no engine of this size can ever hold.
        """
        with self._lock:
            options = self._options(recipe)
            block_length = self.model.facts.block_length or 0
            if block_length:
                canvas.origin = 0
            length = len(canvas.tokens)
            slots = Slots.empty(length, self.forward.shift, block_length)
            row = Row(canvas, recipe, options, slots, canvas.fork(), capacity=length, held=held)
            if complete(canvas) and not held:
                return row
            self.must_fit(recipe, length)
            if self._waiting or not self._place(row):
                return None
            return row

    def drop(self, row: Row) -> None:
        """Let a row go, finished or not: its slots are free at once.  Rows that are not in the
        engine are ignored."""
        with self._lock:
            if row in self._waiting:
                self._waiting.remove(row)
            if row in self.live:
                self.live.remove(row)
                self._leave(row)

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
            row.canvas, row.trials, row.previous, row.jobs = canvas, (), None, []
            if not kept:
                row.slots = Slots.empty(row.capacity, row.slots.shift, row.slots.block_length)
            row.slots.age[kept:] = -1
            row.slots.pending[:] = False

    def close(self) -> None:
        """Drop every row and give the memory of keys and values back."""
        with self._lock:
            for row in [*self.live, *self._waiting]:
                self.drop(row)
            self.forward.release()
            self._checked.clear()

    def _options(self, recipe: Recipe) -> Options:
        """What a recipe asks of the statistics; recipes are checked when they are first met."""
        known = self._checked.get(id(recipe))
        if known is None:
            check_recipe(recipe, self.cache, self.model)
            known = recipe, Options.of(recipe, self.model)
            if len(self._checked) > 1024:  # a server meets a new one with every request
                self._checked.clear()
            self._checked[id(recipe)] = known
        return known[1]

    def must_fit(self, recipe: Recipe, length: int) -> None:
        """Raise `ConfigError` for a row of ``length`` positions that can never be admitted."""
        size = recipe.lanes * recipe.width * length
        if self.cache.stores and self._most is not None and size > self._most:
            raise ConfigError(
                f"the row needs {size} positions of keys and values, the pool holds "
                f"{self._most}: shorten prompt or answer, or raise max_positions"
            )

    def _place(self, row: Row) -> bool:
        """Give a row its slots and let it in, if there is room."""
        if self.max_rows is not None and len(self.live) >= self.max_rows:
            return False
        if self.cache.stores:
            if self.forward.buffer is None:
                self.forward.allot(self._slots or row.size, self._most or 1 << 62)
            assert self.forward.buffer is not None
            try:
                row.base = self.forward.buffer.allocate(row.size)
            except (RuntimeError, MemoryError) as error:  # growing takes both sizes for a moment
                if not is_out_of_memory(error):
                    raise
                if self.live:
                    return False
                raise OutOfMemoryError(
                    f"out of memory for the keys and values of {row.size} positions; shorten "
                    "prompt or answer, or use another cache"
                ) from error
            if row.base is None:
                return False
        self._admitted += 1
        row.number = self._admitted
        self.live.append(row)
        return True

    def _leave(self, row: Row) -> None:
        """Take the slots of a row back that is not live any more."""
        if row.base is not None and self.forward.buffer is not None:
            self.forward.buffer.free(row.base, row.size)
        row.base, row.jobs, row.previous = None, [], None
        self._room_again = True

    def _sweep(self) -> None:
        for row in [row for row in self.live if row.canvas.finished and not row.held]:
            self.live.remove(row)
            self._leave(row)

    def _readmit(self) -> None:
        """Let rows in again that gave their memory back, once another row has left."""
        while self._waiting and (self._room_again or not self.live):
            if not self._place(self._waiting[0]):
                return
            self._waiting.popleft()
            self._room_again = False

    # -- steps ----------------------------------------------------------------------------------

    def run(self, canvases: Iterable[Canvas], recipe: Recipe) -> Iterator[list[Step]]:
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

    def plan(self, rows: Sequence[Row] | None = None) -> list[Row]:
        """The rows (default: all) with their next step planned: `Row.cost` and `Row.refreshes`
        say what it takes.  A planned step stays planned until it runs."""
        with self._lock:
            self._readmit()
            chosen = self.live if rows is None else [row for row in rows if row in self.live]
            for row in chosen:
                if not row.jobs and not row.canvas.finished:
                    try:
                        row.jobs = jobs_of(row, self.cache)
                    except Exception as error:
                        self._fail(row, error)
            self._sweep()
            return [row for row in chosen if row.jobs]

    def step(self, rows: Sequence[Row] | None = None) -> list[Step]:
        """One forward, or micro-batches, for the given rows (default: all); what it did to each.

        A row whose step fails is finished with reason "error" and keeps the error; the others go
        on.  A row that memory does not suffice for gives its slots back and starts again when
        another row has left; the last row that is left fails with `OutOfMemoryError`.
        """
        with self._lock:
            began = time.perf_counter()
            steps: list[Step] = []
            for chunk in self._chunks(self.plan(rows)):
                self._run(chunk, steps)
            elapsed = time.perf_counter() - began
            for row in self.live:
                row.seconds += elapsed
            self._sweep()
            return steps

    def logits(self, row: Row) -> torch.Tensor:
        """Raw logits (n, V) of the undecided positions of the row's window.  Decides nothing."""
        return self.scores([row])[0]

    def scores(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """`logits` of several rows, in one forward."""
        with self._lock:
            jobs = []
            for row in rows:
                plan, targets = plan_row(row, self.cache, row.canvas.masks())
                jobs.append(Job(row, row.canvas, plan, targets))
            scored = self.forward.logits(jobs)
            for job in jobs:
                job.row.slots.computed(job.plan.compute, job.canvas.step)
                job.canvas.nfe += 1
                job.canvas.computed += job.size
            return scored

    def _chunks(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Micro-batches of at most ``max_batch_tokens`` computed positions, at least one row.
        Rows of equal shape stand together in the order of their slots, so that attention can take
        them as one tensor."""
        if len(rows) > 1:
            rows = sorted(rows, key=lambda row: (row.cost, row.capacity, row.base or 0, row.number))
        limit = self.max_batch_tokens
        if rows and limit is None and not any(row.alone for row in rows):
            yield list(rows)
            return
        chunk: list[Row] = []
        size = 0
        for row in rows:
            full = limit and size + row.cost > limit
            if chunk and (full or row.alone or chunk[-1].alone):
                yield chunk
                chunk, size = [], 0
            chunk.append(row)
            size += row.cost
        if chunk:
            yield chunk

    def _run(self, rows: list[Row], steps: list[Step]) -> None:
        """One forward for all of the rows, and what follows from it for each."""
        jobs = [job for row in rows for job in row.jobs]
        try:
            answers = iter(self.forward.predict(jobs))
        except Exception as error:
            self._retry(rows, steps, error)
            return
        for row in rows:
            predictions = [next(answers) for _ in row.jobs]
            try:
                steps.append(settle(row, predictions, self.cache, self.forward.buffer))
            except Exception as error:
                self._fail(row, error)

    def _retry(self, rows: list[Row], steps: list[Step], error: Exception) -> None:
        """After a forward that failed.  Nothing was decided, and the same step writes the same
        slots again; a layerwise cache may have changed its mind on the way, so its rows restart."""
        short = is_out_of_memory(error)
        if short:
            if self.forward.device.type == "cuda":
                torch.cuda.empty_cache()
            size = step_size([job for row in rows for job in row.jobs])
            error = OutOfMemoryError(
                f"out of memory on a step of {size} token positions; pass max_batch_tokens="
                f"{max(1, size // 2)}, fewer rows at a time (max_rows), or shorter texts"
            )
        if len(rows) == 1 and not (short and len(self.live) > 1):
            self._fail(rows[0], error)
            return
        if short:
            self._take_back(max(rows if len(rows) > 1 else self.live, key=lambda row: row.number))
        rows = [row for row in rows if row in self.live]
        if self.cache.layerwise:
            for row in rows:
                row.restart()
                row.alone = not short
        elif short:
            if rows:
                self._run(rows, steps)
        else:
            for row in rows:
                self._run([row], steps)

    def _take_back(self, row: Row) -> None:
        """A row gives its slots back, to start again when another one has left."""
        self.live.remove(row)
        self._leave(row)
        row.restart()
        self._waiting.append(row)
        self._room_again = False
        buffer = self.forward.buffer
        if buffer is not None and not buffer.complete:  # the pool itself is what does not fit
            self.forward.allot(max(1, sum(other.size for other in self.live)), self._most)
            for other in self.live:
                assert self.forward.buffer is not None
                other.base = self.forward.buffer.allocate(other.size)

    def _fail(self, row: Row, error: Exception) -> None:
        """Finish a row whose step failed; the next sweep lets it go."""
        row.error, row.jobs, row.held = error, [], False
        row.canvas.finish("error")
