"""A fixed number of commits per step, or of steps, in any window."""

from ..core.canvas import BoolArray, Canvas
from ..core.capabilities import REPEATABLE, Capability
from ..core.errors import ConfigError
from ..core.limits import COUNT, bounds
from .base import Selector, View, top
from .compose import register


@register("fixed", paper="Large Language Diffusion Models", arxiv="2502.09992")
class Fixed(Selector):
    """Commit the ``n`` (1) most confident positions in every step.

    With ``steps`` in place of ``n``: as many as finish the region in so many steps, what is left
    shared out over the steps that are left.  Unlike the quota of ``llada``, which is laid down when
    a block opens, both suit windows that slide.
    """

    limits = bounds(n=COUNT, steps=COUNT)

    n: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n is not None and self.steps is not None:
            raise ConfigError(f"fixed takes n={self.n} or steps={self.steps}: keep one")

    @property
    def scheduled(self) -> bool:  # type: ignore[override]
        return self.steps is not None

    @property
    def offers(self) -> frozenset[Capability]:  # type: ignore[override]
        return frozenset() if self.steps else frozenset({REPEATABLE})

    def select(self, view: View) -> BoolArray:
        return top(view.score, self._count(view.canvas))

    def _count(self, canvas: Canvas) -> int:
        if self.steps is None:
            return self.n or 1
        left = int(canvas.masked[canvas.start : canvas.end].sum())
        return -(-left // max(1, self.steps - canvas.step))
