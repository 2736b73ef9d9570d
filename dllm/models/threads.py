"""How many threads a network is computed with on a CPU.

PyTorch takes all processors, whatever it multiplies.  Beside another program every product then
waits for the thread that was interrupted, ten times as long as it takes; and small products gain
little from a second thread.  So when a network is loaded a feed-forward layer of its sizes is
computed in turns with one thread, with half of the processors and with all of them; a number is
taken when it is `WORTH` times as fast as the next smaller one that is.

What somebody has decided stays: ``threads=``, ``torch.set_num_threads``, ``OMP_NUM_THREADS``.
"""

import logging
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from ..core.errors import check_whole
from ..kernels.linear import Packed, linear

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
ROWS = 64  # positions of a step, about
WORTH = 1.05
ROUNDS, LEAST = 5, 0.01  # samples of a number of threads; seconds of one
MOST_SECONDS = 0.4  # after which there are no more samples than two
MOST = 2048, 4096  # sizes from which on products behave alike
LOG = logging.getLogger("dllm")
_largest = 0  # numbers in a layer of the largest network that was timed
_ours: int | None = None  # what was chosen here
_fixed = False


def set_threads(count: int) -> None:
    """Compute with so many threads from now on, whatever is loaded.

    Python threads that have computed keep their number.  Raises `ConfigError` below 1.
    """
    global _fixed
    check_whole("threads", count)
    torch.set_num_threads(count)
    _fixed = True


def choose_threads(network: nn.Module) -> None:
    """Set PyTorch's threads for ``network``, unless somebody has."""
    global _largest, _ours
    processors = available()
    device = next((parameter.device for parameter in network.parameters()), None)
    if device is None or device.type != "cpu" or processors == 1 or decided(processors):
        return
    size = sizes(network)
    if size is None or size[0] * size[1] <= _largest:  # as many as the largest one wants
        return
    _largest = size[0] * size[1]
    times = measure(size, next(network.parameters()).dtype, processors)
    chosen = _ours = best(times)
    torch.set_num_threads(chosen)
    LOG.info(
        "%d of %d threads: a feed-forward layer takes %s; threads=N or OMP_NUM_THREADS=N decides "
        "otherwise", chosen, processors,
        ", ".join(f"{1000 * seconds:.2f} ms with {n}" for n, seconds in times.items()),
    )  # fmt: skip


def decided(processors: int) -> bool:
    """Whether somebody has said how many threads there are to be."""
    if _fixed or any(os.environ.get(name) for name in VARIABLES):
        return True
    everything = os.cpu_count() or 1  # PyTorch takes these, or one for two that share a core
    default = {processors, everything, everything // 2} if _ours is None else {_ours}
    return torch.get_num_threads() not in default


def available() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def sizes(network: Any) -> tuple[int, int] | None:
    """Width and feed-forward width; None where the config does not say them."""
    text = network.config.get_text_config()
    wide = getattr(text, "intermediate_size", None)
    hidden = getattr(text, "hidden_size", None)
    if not isinstance(hidden, int) or not isinstance(wide, int):
        return None
    return min(hidden, MOST[0]), min(wide, MOST[1])


def measure(size: tuple[int, int], dtype: torch.dtype, processors: int) -> dict[int, float]:
    """Seconds of a feed-forward layer by number of threads."""
    layer, before = _layer(size, dtype), torch.get_num_threads()
    taken: dict[int, list[float]] = {n: [] for n in (1, processors // 2, processors)}
    end = time.perf_counter() + MOST_SECONDS
    try:
        with torch.inference_mode():
            layer()
            while len(taken[1]) < 2 or (len(taken[1]) < ROUNDS and time.perf_counter() < end):
                for n, seconds in taken.items():
                    torch.set_num_threads(n)
                    layer()
                    seconds.append(_seconds(layer))
    finally:
        torch.set_num_threads(before)
    return {n: median(seconds) for n, seconds in taken.items()}


def _seconds(call: Callable[[], torch.Tensor]) -> float:
    """Of one call, from as many as take `LEAST` together."""
    start, calls, seconds = time.perf_counter(), 0, 0.0
    while seconds < LEAST:
        call()
        calls, seconds = calls + 1, time.perf_counter() - start
    return seconds / calls


def _layer(size: tuple[int, int], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    hidden, wide = size
    up, down = torch.zeros(wide, hidden, dtype=dtype), torch.zeros(hidden, wide, dtype=dtype)
    packed = Packed(), Packed()
    x = torch.ones(ROWS, hidden, dtype=dtype)

    def run() -> torch.Tensor:
        y = linear(x, up, None, packed[0])
        return linear(nn.functional.silu(y) * y, down, None, packed[1]) + x

    return run


def best(times: dict[int, float]) -> int:
    """The fewest threads that others do not beat by `WORTH`."""
    chosen = min(times)
    for n in sorted(times):
        if times[chosen] > WORTH * times[n]:
            chosen = n
    return chosen
