"""D2F: several blocks in a pipeline, each of which commits what it is sure of."""

import numpy as np

from ..core.canvas import BoolArray
from ..core.limits import THRESHOLD, bounds
from .base import Part, Selector, View
from .compose import register
from .d3llm import decide_something
from .eos import Eos
from .scorers import Probability
from .staged_blocks import StagedBlocks, Stages


@register(
    "d2f",
    paper="Diffusion LLMs Can Do Faster-Than-AR Inference via Discrete Diffusion Forcing",
    arxiv="2508.09192",
)
class D2F(Selector):
    """Commit what is likelier than ``tau`` in every open block, and something in the active ones.

    ``tau`` 0.9.  A block opens when a tenth of the one before it is decided, and becomes active at
    95 % of it (`StagedBlocks`): in an active block where nothing is likely enough the best position
    is committed.  After a stop id no further block opens.  Published with its own checkpoints and
    with cache ``d2f``, where blocks see only what stands to their left.
    """

    limits = bounds(tau=THRESHOLD)

    tau: float = 0.9

    def companions(self, family: str) -> tuple[Part, ...]:
        return (StagedBlocks(), Probability(), Eos("last_block"))

    def select(self, view: View) -> BoolArray:
        chosen: BoolArray = np.exp(view.prediction.logprob) > self.tau
        for block in view.canvas.state(Stages).live:
            decide_something(view, chosen, *block)
        return chosen
