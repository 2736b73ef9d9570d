"""The recorded cases of a folder, by what was recorded and not by the name of a file."""

import json
from collections.abc import Callable
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


def recorded(*algorithms: str, where: Callable[[Case], bool] = lambda case: True) -> list[Any]:
    """The cases of these ``algorithms`` as parameters, in whatever files they are.  The default run
    takes the first of each file; the others are slow."""
    return [
        pytest.param(case, id=case["id"], marks=[pytest.mark.slow] * (i > 0))
        for cases in sets().values()
        for i, case in enumerate(c for c in cases if c.get("algorithm") in algorithms and where(c))
    ]
