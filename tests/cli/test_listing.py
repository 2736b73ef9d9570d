"""``dllm samplers`` and ``dllm caches``."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING

import pytest

import dllm.cache
import dllm.samplers
from dllm.cli.listing import CACHE_EXAMPLE, DECIDES, SAMPLER_EXAMPLE, _plain
from dllm.samplers.compose import ROLES

from .conftest import Run


def strict(text: str) -> list[dict[str, object]]:
    """JSON without the extensions that only Python reads."""
    result: list[dict[str, object]] = json.loads(text, parse_constant=pytest.fail)
    return result


@pytest.mark.parametrize(
    ("command", "package"), [("samplers", dllm.samplers), ("caches", dllm.cache)]
)
def test_everything_registered_is_listed(cli: Run, command: str, package: object) -> None:
    available = package.available()  # type: ignore[attr-defined]
    table, listed = cli(command).stdout, strict(cli(command, "--json").stdout)
    assert [entry["name"] for entry in listed] == [info.name for info in available]
    for info in available:
        assert info.name in table and info.arxiv in table


def test_what_a_sampler_says_of_itself(cli: Run) -> None:
    entries = {entry["name"]: entry for entry in strict(cli("samplers", "--json").stdout)}
    threshold = entries["threshold"]
    assert (threshold["role"], threshold["arxiv"]) == ("selector", "2505.22618")
    assert threshold["defaults"] == {"tau": 0.9}
    assert threshold["needs"] == ["probability scores"]
    table = cli("samplers").stdout
    assert "tau=0.9" in table and "needs probability scores" in table and "``" not in table


def test_every_role_has_a_question() -> None:
    assert set(ROLES) <= set(DECIDES)


def test_the_examples_are_valid() -> None:
    dllm.samplers.compose(SAMPLER_EXAMPLE.split("'")[1])
    dllm.cache.compose(CACHE_EXAMPLE.split("'")[1])


def test_defaults_that_json_lacks() -> None:
    assert _plain({"a": math.inf, "b": (1, None), "c": MISSING, "d": int}) == {
        "a": "inf",
        "b": [1, None],
        "d": "<class 'int'>",
    }
