"""Rows at work: what the engine of diffusion models and speculation have in common.

`Work` lets rows in, has them take their steps together, and lets them go.  A row that fails takes
nobody with it, and one that memory does not suffice for starts again later.  The scheduler and
everything above it know no more than this.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from ..core.canvas import Canvas
from ..core.errors import FAILURES, ConfigError, OutOfMemoryError, failure
from .memory import is_out_of_memory


@dataclass(slots=True, eq=False)
class Row:
    """A text at work, as its recipe says.

    ``held``: it stays when it is finished, until `Work.drop`.  ``number``: rows are counted as they
    join.  ``seconds``: time of the steps between its admission and its end.  ``restarts``: how many
    times it gave its memory back and began again.  ``alone``: its forwards are its own, because a
    shared one failed.  ``inexact``: in some step the completion of its structure was not certainly
    the likeliest one.
    """

    canvas: Canvas
    recipe: Any
    held: bool = field(default=False, kw_only=True)
    number: int = field(default=0, kw_only=True)
    seconds: float = field(default=0.0, kw_only=True)
    restarts: int = field(default=0, kw_only=True)
    alone: bool = field(default=False, kw_only=True)
    inexact: bool = field(default=False, kw_only=True)
    error: BaseException | None = field(default=None, kw_only=True)

    @property
    def size(self) -> int:
        """Positions of keys and values that it owns, or needs."""
        raise NotImplementedError

    @property
    def planned(self) -> bool:
        """Whether its next step is planned and has not run yet."""
        raise NotImplementedError

    @property
    def cost(self) -> int:
        """Token positions that its planned step feeds to the model."""
        raise NotImplementedError

    @property
    def order(self) -> tuple[int, ...]:
        """Neighbours in this order are cheap to attend to together."""
        return (self.number,)

    def restart(self) -> None:
        """Forget everything since the admission."""
        raise NotImplementedError


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """What one step did to one row.  ``decision``: what was committed and taken back, a
    `samplers.Decision`, in this ``window``, in the row's step ``number`` (from 0); ``positions``
    were computed for it; ``accepted`` of the committed tokens a drafter had proposed."""

    row: Any
    canvas: Canvas
    decision: Any
    window: tuple[int, int] = (0, 0)
    number: int = 0
    positions: int = 0
    accepted: int = 0

    @property
    def proposals(self) -> dict[int, int]:
        """Position -> token that was proposed there, committed or not."""
        return {}


R = TypeVar("R", bound=Row)
T = TypeVar("T")
LOG = logging.getLogger(__name__)
S = TypeVar("S", bound=Step)
FILLS = 300  # positions of a forward from which on a device multiplies at its full rate


@dataclass(slots=True)
class Flight(Generic[R]):
    """A forward that was launched: its rows, how often each began again, what waits for answers."""

    rows: list[tuple[R, int]]
    wait: Callable[[], Iterator[Any]]


class Work(Generic[R, S]):
    """Rows that take their steps together, as many of them at a time as there is room for.

    ``max_batch_size``: most rows at a time; ``most``, kept as ``positions``: most positions of keys
    and values that they may own, None without bound; ``max_batch_tokens``: most token positions of
    one forward, more are cut into micro-batches of whole rows.  It may be called from several
    threads, one at a time: calls wait for one another.
    """

    cache_name = ""
    kind: Any = None  # of its results, None for `runtime.result.Result`
    leaves_rows_changed = False  # after a forward that fails, so that they begin anew
    overlaps = False  # whether a device computes while the host goes on

    def __init__(
        self, model: Any, max_batch_size: int | None, most: int | None, max_batch_tokens: int | None
    ) -> None:
        self.model, self.max_batch_size = model, max_batch_size
        self.max_batch_tokens, self.positions = max_batch_tokens, most
        self.live: list[R] = []
        self._waiting: deque[R] = deque()  # rows that gave their memory back
        self._flights: deque[Flight[R]] = deque()  # forwards under way, the oldest first
        self._room_again = False
        self._admitted = 0
        self._lock = threading.RLock()

    # -- what a kind of work says ---------------------------------------------------------------

    def admit(self, canvas: Canvas, recipe: Any) -> R | None:
        """Take a row in; None when there is no room for it now.  Raises what is wrong with it."""
        raise NotImplementedError

    @property
    def forward_seconds(self) -> float:
        """Seconds of all forwards so far."""
        raise NotImplementedError

    @property
    def stores(self) -> bool:
        """Whether rows own positions of keys and values."""
        return True

    @property
    def cache_bytes(self) -> int:
        """Memory of the keys and values that are held."""
        return 0

    def figures(self, row: R) -> dict[str, Any]:
        """Fields of the row's `Result` that belong to this kind of work."""
        raise NotImplementedError

    def check(self, recipe: Any) -> None:
        """Raise what is wrong with a recipe, for this engine and its model."""

    def ready(self, row: R) -> bool:
        """Whether the row can take a step now."""
        return True

    def takes_room(self, row: R) -> bool:
        """Whether the row counts among ``max_batch_size``."""
        return True

    def _allot(self, row: R) -> bool:
        """Give a row what it keeps between steps; False while there is no room for it."""
        raise NotImplementedError

    def _leave(self, row: R) -> None:
        """Take back what `_allot` gave to a row that is not live any more."""
        raise NotImplementedError

    def _plan(self, rows: list[R]) -> None:
        """Plan a step of each of the ``rows``, or `_fail` it."""
        raise NotImplementedError

    def _forward(self, rows: list[R]) -> Callable[[], Iterator[Any]]:
        """Launch one forward for the planned steps; what waits for it: an answer per row."""
        raise NotImplementedError

    def _settle(self, row: R, answer: Any) -> S:
        """What the row makes of its answer."""
        raise NotImplementedError

    def _shrink(self) -> None:
        """A row has given its memory back."""

    def prefix_cache_tokens(self, tokens: int | None) -> None:
        """Keep up to ``tokens`` tokens of texts that are complete, with their keys and values, for
        texts that begin like them; 0: none, None: as the engine thinks best.  Raises `ConfigError`
        where a prefix's depend on what follows it."""
        raise NotImplementedError

    # -- rows join and leave --------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Positions of keys and values that rows own."""
        return sum(row.size for row in self.live if self.takes_room(row)) if self.stores else 0

    @property
    def room(self) -> float:
        """Rows that could join at once."""
        if self.max_batch_size is None:
            return math.inf
        return max(0, self.max_batch_size - sum(map(self.takes_room, self.live)))

    def must_fit(self, recipe: Any, length: int) -> None:
        """Raise what is wrong with a recipe; `ConfigError` if ``length`` is more than ever fits."""
        self.check(recipe)
        size = recipe.owned * length
        if self.stores and self.positions is not None and size > self.positions:
            raise ConfigError(
                f"the row needs {size} positions of keys and values, the pool holds "
                f"{self.positions}: shorten prompt or answer, or raise max_positions"
            )

    def _join(self, row: R) -> bool:
        """Let a row in, if there is room and nobody waits for it."""
        return not self._waiting and self._enter(row)

    def _enter(self, row: R) -> bool:
        if self.takes_room(row) and not self.room:
            return False
        try:
            if not self._allot(row):
                return False
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if any(map(self.takes_room, self.live)):
                return False
            raise OutOfMemoryError(
                f"out of memory for the keys and values of {row.size} positions; shorten "
                "prompt or answer, or use another cache"
            ) from error
        self._admitted += 1
        row.number = self._admitted
        self.live.append(row)
        return True

    def drop(self, row: R) -> None:
        """Let a row go, finished or not: its memory is free at once.  Unknown rows are ignored."""
        with self._lock:
            if row in self._waiting:
                self._waiting.remove(row)
            if row in self.live:
                self._part(row)

    def close(self) -> None:
        with self._lock:
            self._flights.clear()
            for row in [*self.live, *self._waiting]:
                self.drop(row)

    def _part(self, row: R) -> None:
        self.live.remove(row)
        self._room_again = True
        try:
            self._leave(row)
        except Exception:  # its text is what it is
            LOG.exception("a text could not give back what it held")

    def _sweep(self) -> None:
        for row in [row for row in self.live if row.canvas.finished and not row.held]:
            self._part(row)

    def _readmit(self) -> None:
        """Let rows in again that gave their memory back, once another row has left."""
        while self._waiting and (self._room_again or not self.live):
            row = self._waiting[0]
            try:
                if not self._enter(row):
                    return
            except FAILURES as error:
                self._fail(row, error)
            self._waiting.popleft()
            self._room_again = False

    # -- steps ----------------------------------------------------------------------------------

    def plan(self, rows: Sequence[R] | None = None) -> list[R]:
        """The rows (default: all) with their next step planned: `Row.cost` says what it
        takes.  A planned step stays planned until it runs."""
        with self._lock:
            self._readmit()
            chosen = self.live if rows is None else [row for row in rows if row in self.live]
            chosen = [row for row in chosen if self.ready(row)]
            self._plan([row for row in chosen if not row.planned and not row.canvas.finished])
            self._sweep()
            return [row for row in chosen if row.planned]

    def step(self, rows: Sequence[R] | None = None, ahead: bool = False) -> list[S]:
        """One forward, or micro-batches, for the given rows (default: all); what it did to each.

        ``ahead``: the next forward is launched before this returns, so that the device computes
        while the caller looks at what happened.  Where half of the rows fill the device (`FILLS`),
        they go in two groups: a call then waits for one of them, while the other computes.

        A row whose step fails is finished with reason "error" and keeps the error; the others go
        on.  A row that memory does not suffice for gives it back and starts again when another row
        has left; the last row that is left fails with `OutOfMemoryError`.
        """
        with self._lock:
            began = time.perf_counter()
            steps: list[S] = []
            if ahead and not self._flights:
                self._launch(rows, steps)
            planned = [] if ahead else self.plan(rows)
            present = [row for row in self.live if row.planned or self.takes_room(row)]
            if ahead and self._flights:
                self._land(self._flights.popleft(), steps)
            for chunk in self._chunks(planned, self.max_batch_tokens):
                self._run(chunk, steps)
            if ahead:
                self._sweep()
                self._launch(rows, steps)
            elapsed = time.perf_counter() - began
            for row in present:
                row.seconds += elapsed
            self._sweep()
            return steps

    def _launch(self, rows: Sequence[R] | None, steps: list[S]) -> None:
        """Launch forwards for those of the rows that have none under way."""
        flying = {row for flight in self._flights for row, _ in flight.rows}
        planned = self.plan(rows)
        ready = [row for row in planned if row not in flying]
        size, limit = sum(row.cost for row in planned), self.max_batch_tokens
        if flying and size < 2 * FILLS:
            return  # they wait for the others, to go with them
        if not flying and size >= 2 * FILLS and len(ready) > 1:
            half = size // 2 + max(row.cost for row in ready)
            limit = half if limit is None else min(limit, half)
        for chunk in self._chunks(ready, limit):
            flight = self._start(chunk, steps)
            if flight is not None:
                self._flights.append(flight)

    def _chunks(self, rows: Sequence[R], limit: int | None) -> Iterator[list[R]]:
        """Micro-batches of at most ``limit`` computed positions, at least one row."""
        if len(rows) > 1:
            rows = sorted(rows, key=lambda row: row.order)
        if rows and limit is None and not any(row.alone for row in rows):
            yield list(rows)
            return
        chunk: list[R] = []
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

    def _run(self, rows: list[R], steps: list[S]) -> None:
        """One forward, and what follows from it for each of the rows."""
        flight = self._start(rows, steps)
        if flight is not None:
            self._land(flight, steps)

    def _start(self, rows: list[R], steps: list[S]) -> Flight[R] | None:
        """Launch a forward for those of the rows that still have a planned step: one may have given
        its memory back since it was planned."""
        rows = [row for row in rows if row.planned and row in self.live]
        if not rows:
            return None
        try:
            return Flight([(row, row.restarts) for row in rows], self._forward(rows))
        except FAILURES as error:
            while self._flights:  # settled before anything moves
                self._land(self._flights.popleft(), steps)
            self._retry(rows, steps, error)
            return None

    def _land(self, flight: Flight[R], steps: list[S]) -> None:
        """Wait for a forward, and make of it what follows for each row that is still there."""
        try:
            answers = flight.wait()
        except FAILURES as error:
            self._retry([row for row, _ in flight.rows], steps, error)
            return
        for (row, restarts), answer in zip(flight.rows, answers, strict=True):
            if not row.planned or row.restarts != restarts:
                continue
            step = self._guarded(row, partial(self._settle, row, answer))
            steps += [] if step is None else [step]

    def _retry(self, rows: list[R], steps: list[S], error: BaseException) -> None:
        """After a forward that failed: nothing was decided, and the same step can run again."""
        short = is_out_of_memory(error)
        if short:
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()
            size = sum(row.cost for row in rows)
            error = OutOfMemoryError(
                f"out of memory on a step of {size} token positions; pass max_batch_tokens="
                f"{max(1, size // 2)}, fewer rows at a time (max_batch_size), or shorter texts"
            )
            self._sweep()  # texts that are finished make room first
        several = rows if len(rows) > 1 else self.live
        givers = [row for row in several if short and self.takes_room(row)]
        if len(rows) == 1 and not (givers and len(self.live) > 1):
            self._fail(rows[0], error)
            return
        if givers:
            giver = max(givers, key=lambda row: row.number)
            self._take_back(giver)
            steps[:] = [step for step in steps if step.row is not giver]  # begun anew: not made
        if self.leaves_rows_changed:
            for row in rows:
                if row in self.live:
                    row.restart()
                    row.alone = not short
        elif givers:
            self._run(rows, steps)
        else:
            for row in rows:
                self._run([row], steps)

    def _take_back(self, row: R) -> None:
        """A row gives its memory back, to start again when another one has left."""
        self._part(row)
        row.restart()
        self._waiting.append(row)
        self._room_again = False
        self._shrink()

    def _guarded(self, row: R, work: Callable[[], T]) -> T | None:
        """The result of ``work``; if it raises, the row fails."""
        try:
            return work()
        except FAILURES as error:
            self._fail(row, error)
            return None

    def _fail(self, row: R, error: BaseException) -> None:
        """Finish a row whose step failed; the next sweep lets it go."""
        row.error, row.held = failure(error), False
        row.canvas.finish("error")
