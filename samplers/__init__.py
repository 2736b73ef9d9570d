"""Unmasking policies: small parts that compose into samplers, a file per method.

>>> from dllm.samplers import compose
>>> compose("threshold(tau=0.85)").selectors
(Threshold(tau=0.85),)

A part that only completes one method lies in that method's file; general scorers, windows and
end-of-text rules are in `scorers`, `windows` and `eos`.
"""

from importlib import import_module
from pkgutil import iter_modules

from ..core.capabilities import Capability
from ..core.spec import Info
from .base import NOTHING, Part, Prediction, Reads, Scorer, Selector, Stop, Transform, View, Window
from .compose import SAMPLERS, available, compose, register
from .sampler import Sampler
from .turn import THE_ROW, Course, Decision, Explorer, Feed, Length, Reviser, Seen, Trial, Turn

__all__ = [
    "NOTHING", "SAMPLERS", "THE_ROW", "Capability", "Course", "Decision", "Explorer", "Feed",
    "Info", "Length", "Part", "Prediction", "Reads", "Reviser", "Sampler", "Scorer", "Seen",
    "Selector", "Stop", "Transform", "Trial", "Turn", "View", "Window", "available", "compose",
    "register",
]  # fmt: skip

for _file in iter_modules(__path__):  # importing a file registers its parts
    import_module(f".{_file.name}", __name__)
