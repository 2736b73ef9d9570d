"""The recorded cases of a folder, by what was recorded and not by the name of a file."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from .conftest import goldens_dir

Case = dict[str, Any]


@cache
def sets() -> dict[str, list[Case]]:
    """Every file of decoding traces and of losses in the folder, and its cases."""
    folder = goldens_dir()
    paths = [
        path for kind in ("traces", "losses") for path in sorted((folder / kind).glob("*.json"))
    ]
    return {
        f"{path.parent.name}/{path.stem}": json.loads(path.read_text(encoding="utf-8"))["cases"]
        for path in paths
    }


def setting(case: Case) -> set[tuple[str, Any]]:
    """What names a way of decoding: words and switches, not numbers, texts or models."""
    return {
        (key, value) for key, value in case.items()
        if isinstance(value, str | bool) and key not in ("id", "model")
    }  # fmt: skip


def recorded(*algorithms: str, where: Callable[[Case], bool] = lambda case: True) -> list[Any]:
    """The cases of these ``algorithms`` as parameters, in whatever files they are.  The default run
    takes those with a word or switch that no case of the same file had before; the others are
    slow."""
    return list(_parameters(set(algorithms), where))


def _parameters(algorithms: set[str], where: Callable[[Case], bool]) -> Iterator[Any]:
    for cases in sets().values():
        seen: set[tuple[str, Any]] = set()
        for case in cases:
            if case.get("algorithm") not in algorithms or not where(case):
                continue
            again = bool(seen) and setting(case) <= seen
            seen |= setting(case)
            yield pytest.param(case, id=case["id"], marks=[pytest.mark.slow] * again)
