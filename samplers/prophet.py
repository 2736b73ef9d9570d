"""Prophet: when the answer is already decided, stop refining."""

from typing import ClassVar

import numpy as np

from ..core.canvas import Canvas, IntArray
from ..core.capabilities import ALL_LOGITS, CONSTRAINED, FINAL, FIXED_LENGTH, OWN_PREDICTIONS
from ..core.errors import ConfigError
from ..core.limits import COUNT, NOT_NEGATIVE, bounds, one_of
from .base import Part, Reads, Stop, View
from .compose import register
from .llada import LLaDA, Quota

REGIONS = ("answer_span", "window_masked", "all_masked")
PROGRESS = ("steps", "tokens")


@register(
    "prophet", paper="Diffusion Language Models Know the Answer Before Decoding", arxiv="2508.19982"
)
class Prophet(Stop):
    """Commit everything at once as soon as the mean logit gap of the answer is large enough.

    The gap is the best logit minus the second, averaged over the answer's positions; it has to
    reach ``early`` (7.5) in the first third of the decoding, ``mid`` (5.0) in the second, ``late``
    (2.5) after it.  The answer is the ``answer`` (5) positions from offset ``start`` of the region
    on, decided ones included, as published, unless ``include_committed=False``; a ``start`` that is
    left open is two positions after the last one that is given (`constraints`).  Where nothing is
    given either, the method is extended to the undecided positions of the row
    (``region="all_masked"``) or of the window (``"window_masked"``); for a region of your own
    override `span`.  Progress is step / ``steps`` (default: the length of the region), as published
    (``progress="steps"``); where ``steps`` is not given and no selector keeps a schedule, it is the
    decided share (``"tokens"``, an extension).  A bare ``prophet`` decodes by LLaDA's quota, or by
    ``threshold`` where a window slides.  Gaps depend on the model: the defaults are LLaDA-8B's.
    """

    needs = frozenset({ALL_LOGITS, CONSTRAINED, FINAL, OWN_PREDICTIONS, FIXED_LENGTH})
    statistics: ClassVar = {"gap": 1}
    limits = bounds(
        region=one_of(REGIONS), progress=one_of(PROGRESS), answer=COUNT, start=NOT_NEGATIVE,
        steps=COUNT
    )  # fmt: skip

    answer: int = 5
    start: int | None = None
    early: float = 7.5
    mid: float = 5.0
    late: float = 2.5
    steps: int | None = None
    region: str | None = None
    progress: str | None = None
    include_committed: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start is not None and self.region not in (None, "answer_span"):
            raise ConfigError(f"start={self.start} says where the answer is: drop {self.region}")
        if self.region == "answer_span" and self.start is None:
            raise ConfigError("region=answer_span needs to know where it starts: pass start")

    def companions(self, family: str) -> tuple[Part, ...]:
        return (LLaDA(),)

    def threshold(self, canvas: Canvas) -> float:
        """The gap that this step has to reach."""
        if self.progress == "tokens":
            total = int((~canvas.given[canvas.start :]).sum())
            progress = 1 - int(canvas.masked[canvas.start :].sum()) / total
        else:
            start, end = canvas.region
            steps, taken = self.steps or end - start, canvas.step
            if Quota in canvas.states:  # blocks take their steps, also where tokens are given
                before = steps * (canvas.window[0] - start) // (end - start)
                taken = max(taken, before + canvas.block_step)
            progress = (taken + 1) / steps
        return self.early if progress < 0.33 else self.mid if progress < 0.67 else self.late

    def _first(self, canvas: Canvas) -> int | None:
        """Where the answer starts, if that is known."""
        if self.start is not None:
            return canvas.start + self.start
        behind = canvas.text_floor + 1  # the last given position and 2
        return behind if self.region is None and canvas.start + 1 < behind < canvas.end else None

    def span(self, canvas: Canvas) -> IntArray:
        """The positions (n,) whose mean gap decides, ascending; none: nothing is committed."""
        low = self._first(canvas)
        if low is not None:
            answer = np.arange(min(low, canvas.end), min(low + self.answer, canvas.end))
            return answer if self.include_committed else answer[canvas.masked[answer]]
        return canvas.masks() if self.region == "window_masked" else self._open(canvas)

    def _open(self, canvas: Canvas) -> IntArray:
        return np.flatnonzero(canvas.masked[: canvas.end])

    def reads(self, canvas: Canvas) -> Reads:
        return Reads(np.union1d(self._open(canvas), self.span(canvas)))

    def fill(self, view: View) -> bool:
        span = self.span(view.canvas)
        needed = self.threshold(view.canvas)
        if not span.size:
            return False
        gap = view.all_predictions.at(span).gap
        assert gap is not None
        return float(gap.mean()) >= needed
