"""WeDLM's decoding rule: entropy plus distance."""

import numpy as np

from ..core.canvas import BoolArray
from ..core.capabilities import ENTROPY
from ..core.limits import FINITE, NOT_NEGATIVE, bounds
from .base import Part, Selector, View
from .compose import register
from .dcd import DCD
from .eos import Eos
from .scorers import NegEntropy


@register(
    "wedlm",
    paper="WeDLM: Reconciling Diffusion Language Models with Standard Causal Attention for Fast "
    "Inference",
    arxiv="2512.22737",
)
class WeDLM(Selector):
    """Commit every position whose entropy, plus a price for its distance, stays below ``tau``.

    The price is ``penalty`` nats (0.02 as released; 0.1 in the paper's tables) per position from
    the first undecided one; ``tau`` is 0.4 nats.  Where nothing is below it, the cheapest is
    committed.  The window is the 16 positions from the first undecided one, `dcd(16, 16)`, and the
    text ends with a stop id that has nothing undecided to its left.

    This is the rule, for any model.  On WeDLM's own, which attend causally to decided tokens first,
    and with ``cache="wedlm"``, it is the streaming decoding of the paper: a token with nothing
    undecided on its left is final, and fed once more for its keys and values.
    """

    needs = frozenset({ENTROPY})
    limits = bounds(tau=NOT_NEGATIVE, penalty=FINITE)

    tau: float = 0.4
    penalty: float = 0.02

    def companions(self, family: str) -> tuple[Part, ...]:
        return (NegEntropy(), Eos("prefix_complete"), DCD(s_init=16, s_max=16))

    def select(self, view: View) -> BoolArray:
        cost = float(self.penalty) * (view.positions - view.canvas.masks()[:1]) - view.score
        chosen: BoolArray = cost < self.tau
        return np.arange(len(cost)) == cost.argmin() if cost.size and not chosen.any() else chosen
