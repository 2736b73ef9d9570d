"""What a sampler and a cache both read, which do not know each other."""

from dataclasses import dataclass, field

import numpy as np

from .canvas import IntArray


@dataclass(slots=True)
class Blocks:
    """The blocks that a window with several of them has opened so far, as ascending ``edges``, one
    more than blocks; empty where a window is one block."""

    edges: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
