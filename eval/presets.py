"""Named sweeps of ``dllm bench``."""

from collections.abc import Callable, Sequence
from typing import Any

from ..cache import available as caches
from ..core.errors import UnknownNameError
from .curves import samplers_with_curves
from .sweep import Sweep

# One task with one answer, and two with several: there parallel decisions contradict each other.
README_TASKS = ("sort", "remove_random", "insert_random")
AT = "threshold(tau=0.9)"  # the sampler under which caches are compared
BASELINE = "llada(steps=32)"  # one token per step
RANDOM = "random+llada(steps=32)"  # for caches that must know commits beforehand
FORESEEING = "dkv_greedy"


def readme() -> list[Sweep]:
    """Every sampler as a curve, every cache as a ratio; under half an hour on two cores."""
    canvas = (("max_new_tokens", 32), ("block_length", 16))
    names = [cache.name for cache in caches()]
    how: dict[str, Any] = {"examples": 96, "rows": 96, "arguments": canvas}
    return [
        Sweep(README_TASKS, curves=samplers_with_curves(), **how),
        Sweep(README_TASKS, samplers=[BASELINE, AT], caches=names, **how),
        Sweep(README_TASKS, samplers=[RANDOM], caches=["none", FORESEEING], **how),
    ]


def quick() -> list[Sweep]:
    """One curve and one cache on two tasks: whether everything works, in seconds."""
    canvas = (("max_new_tokens", 32), ("block_length", 16))
    tasks = ("reverse", "sort")
    return [
        Sweep(tasks, curves=["threshold"], examples=8, rows=8, arguments=canvas),
        Sweep(tasks, samplers=[AT], caches=["none", "dual"], examples=8, rows=8, arguments=canvas),
    ]


PRESETS: dict[str, Callable[[], Sequence[Sweep]]] = {"readme": readme, "quick": quick}


def preset(name: str) -> list[Sweep]:
    """The sweeps of a preset.  Raises `UnknownNameError`."""
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    return list(PRESETS[name]())
