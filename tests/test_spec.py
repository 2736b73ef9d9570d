"""Specs are read by many threads at a time."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

from dllm.samplers import compose


def test_threads_read_specs_at_the_same_time() -> None:
    """Without turns Python 3.11 raises SystemError when a collection falls into one of them."""
    spec = "adablock+" * 30 + "lopa(threshold(tau=0.8), k=3)"
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(20)  # a collection in the middle of a tree lets another thread run
    gc.callbacks.append(_look)
    try:
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda _: _read(spec), range(200)))
    finally:
        gc.callbacks.remove(_look)
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    assert len(set(results)) == 1


def _look(*_: object) -> None:
    """Python code in which threads may change."""


def _read(spec: str) -> str:
    try:
        compose(spec)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "read"
