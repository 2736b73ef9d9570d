"""ETE: exploit what is sure, explore what would make more sure."""

from typing import ClassVar

import numpy as np

from ..core.canvas import BoolArray, FloatArray
from ..core.capabilities import BRANCHES, PROBABILITY
from ..core.limits import COUNT, LANES, THRESHOLD, bounds, one_of
from .base import Part, View, top
from .compose import register
from .multi_blocks import BITS_TO_ROUNDS, FirstBlock, MultiBlocks
from .threshold import Threshold
from .turn import Explorer, Turn

ORDERS = ("conf", "entropy", "hybrid")
HOPELESS = 0.3  # guesses below this probability are not worth a branch


@register("ete", paper=BITS_TO_ROUNDS, arxiv="2511.21103")
class ETE(Explorer):
    """Where nothing is sure enough, try ``k`` commits at once and keep the one that helps most.

    Experimental: reconstructed from the paper's abstract.  Several blocks are open
    (`MultiBlocks`).  A step that commits fewer than ``e_min`` (1) positions
    by its selectors (default: probability >= ``tau``, 0.9) opens ``k`` (4) branches, each with one
    more position of the first block committed: the most uncertain above probability 0.3
    (``order="entropy"``, after the abstract), the most confident ones ("conf"), or half of each
    ("hybrid"); the most confident fill what is missing.  The branch in which most positions of the
    window reach ``tau`` is kept; its forward is also the next step's.
    """

    needs = frozenset({BRANCHES, PROBABILITY})
    statistics: ClassVar = {"entropy": 1}
    limits = bounds(tau=THRESHOLD, k=LANES, e_min=COUNT, order=one_of(ORDERS))

    base: tuple[Part, ...] = ()
    k: int = 4
    tau: float = 0.9
    e_min: int = 1
    order: str = "entropy"

    @property
    def width(self) -> int:
        return self.k

    def companions(self, family: str) -> tuple[Part, ...]:
        return (MultiBlocks(), Threshold(self.tau))

    def _candidates(self, view: View, chosen: BoolArray) -> BoolArray:
        end = view.canvas.state(FirstBlock).end
        edge = view.canvas.window[1] if end is None else end
        result: BoolArray = ~chosen & (view.positions < edge)
        return result

    def decide(self, turn: Turn) -> None:
        if turn.feed.branches:
            turn.keep(self._best(turn))
        turn.choose(force=False)
        if not turn.stopped() and not self._explores(turn.view, turn.chosen):
            turn.force()
        turn.go_on()
        if turn.goes_on:
            turn.try_next(self._tried(turn.view, turn.chosen))

    def _explores(self, view: View, chosen: BoolArray) -> bool:
        if chosen.sum() >= self.e_min or self.k == 1:
            return False
        return int(self._candidates(view, chosen).sum()) > 1

    def _tried(self, view: View, chosen: BoolArray) -> list[BoolArray]:
        if not self._explores(view, chosen):
            return []
        open_ = self._candidates(view, chosen)
        sure = np.where(open_, view.score, -np.inf).astype(np.float32)
        if self.order == "conf":
            picked = top(sure, self.k) & open_
        else:
            entropy = view.prediction.entropy
            assert entropy is not None
            unsure: FloatArray = np.where(
                open_ & (view.score >= HOPELESS), entropy, -np.inf
            ).astype(np.float32)
            count = self.k if self.order == "entropy" else self.k // 2
            picked = top(unsure, count) & (unsure > -np.inf)
            rest = np.where(picked, -np.inf, sure).astype(np.float32)
            picked |= top(rest, self.k - int(picked.sum())) & open_
        return [np.arange(len(open_)) == i for i in np.flatnonzero(picked)]

    def _best(self, turn: Turn) -> int:
        branches = [seen.canvas for seen in turn.seen]
        result = [seen.prediction.of_window(seen.canvas) for seen in turn.seen]

        def rank(i: int) -> tuple[int, float, float]:
            p = result[i]
            sure = int((np.exp(p.logprob) >= self.tau).sum())
            mean = float(p.logprob.mean()) if len(p.logprob) else 0.0
            own = branches[i - 1].masked & ~branches[i].masked  # what it alone has committed
            return sure, mean, float(branches[i].logprob[own].sum())

        return max(range(len(branches)), key=lambda i: (*rank(i), -i))
