"""How many cases a fuzzer takes.

A fuzzer is a test with the argument ``seeds``, a range of numbers each of which makes its case
again, marked ``fuzz(n)``: it takes the first ``n`` in the default run, and 10,000 with ``-m slow``.

    DLLM_FUZZ=500 DLLM_FUZZ_FIRST=20000 pytest -m fuzz tests/fuzz/test_bodies.py

takes 500 others.  The seeds are in a test's name, and that of a case which fails in its message.
"""

import os

import pytest

MANY = 10_000  # cases with -m slow
FEW, LARGE = 20, 100  # cases of one test, in the default run and with -m slow


def ranges(first: int, last: int, size: int) -> list[range]:
    return [range(at, min(at + size, last)) for at in range(first, last, size)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("fuzz")
    if mark is None:
        return
    asked, first = os.environ.get("DLLM_FUZZ"), int(os.environ.get("DLLM_FUZZ_FIRST", 0))
    (default,) = mark.args
    groups = ranges(first, first + int(asked or default), FEW)
    params = [pytest.param(seeds, id=_name(seeds)) for seeds in groups]
    if not asked and "not slow" not in metafunc.config.getoption("markexpr"):
        rest = ranges(first + default, first + MANY, LARGE)
        params += [pytest.param(seeds, id=_name(seeds), marks=pytest.mark.slow) for seeds in rest]
    metafunc.parametrize("seeds", params)


def _name(seeds: range) -> str:
    return f"{seeds[0]}-{seeds[-1]}"
