"""One text to be written: what waits, runs, and has a result in the end."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..core.canvas import Canvas
from ..engine.work import Row, Step


@dataclass(eq=False)
class Request:
    """One text to be written.

    ``make`` builds its canvas, of ``positions`` positions, when it is admitted; ``size`` of them
    are to be decided, as ``recipe`` says.  ``deadline``: seconds since `submitted` after which it
    fails with `DeadlineError`.  When it is done, either ``result`` or ``error`` is set.
    ``frontier``: how far its final text has been reported.
    """

    index: int
    make: Callable[[], Canvas]
    recipe: Any
    positions: int
    size: int
    traced: bool = False
    deadline: float | None = None
    submitted: float = field(default_factory=time.perf_counter)
    queue_seconds: float | None = None
    canvas: Canvas | None = None
    row: Row | None = None
    trace: Any = None
    result: Any = None
    error: BaseException | None = None
    frontier: int = -1
    restarts: int = 0  # of its row, when the trace was last written

    def record(self, step: Step) -> None:
        """Write a step to the trace; what was before a restart is not of it."""
        assert self.trace is not None
        if step.row.restarts != self.restarts:
            self.restarts = step.row.restarts
            self.trace.steps.clear()
            self.trace.computed = 0
        self.trace.add(step)

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None
