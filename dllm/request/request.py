"""One text to be written: what waits, runs, and has a result in the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..core.canvas import Canvas
from ..engine.work import Row


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

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None
