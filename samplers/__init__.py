"""Unmasking policies: small parts that compose into samplers.

>>> from dllm.samplers import compose
>>> compose("threshold(tau=0.85)").selectors
(Threshold(tau=0.85),)
"""

from __future__ import annotations

from ..capabilities import Capability
from . import (
    adablock,
    credit,
    d2f,
    d3llm,
    dawn,
    dcd,
    dparallel,
    dream,
    dsb,
    eb,
    eos,
    ete,
    fixed,
    freedave,
    hierarchical,
    klass,
    learn2pd,
    llada,
    localleap,
    lopa,
    priors,
    prophet,
    r2,
    saber,
    scorers,
    slowfast,
    threshold,
    wedlm,
    windows,
    wino,
)
from .base import (
    NOTHING,
    Decision,
    Explorer,
    Part,
    Prediction,
    Reviser,
    Scorer,
    Selector,
    Stop,
    Transform,
    Trial,
    View,
    Window,
)
from .compose import SAMPLERS, Info, available, compose, register
from .sampler import Sampler

__all__ = [
    "NOTHING", "SAMPLERS", "Capability", "Decision", "Explorer", "Trial", "Info", "Part",
    "Prediction", "Reviser", "Sampler", "Scorer", "Selector", "Stop", "Transform", "View",
    "Window", "available", "compose", "register", "adablock", "credit", "d2f", "d3llm", "dawn",
    "dcd", "dparallel", "dream", "dsb", "eb", "eos", "ete", "fixed", "freedave", "hierarchical",
    "klass", "learn2pd", "llada", "localleap", "lopa", "priors", "prophet", "r2", "saber",
    "scorers", "slowfast", "threshold", "wedlm", "windows", "wino",
]  # fmt: skip
