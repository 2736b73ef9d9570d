"""``dllm samplers`` and ``dllm caches``."""

from typing import Any

import pytest

import dllm.cache
import dllm.samplers
from dllm.cli.listing import CACHE_EXAMPLE, DECIDES, SAMPLER_EXAMPLE
from dllm.samplers.compose import ROLES

from .conftest import Run

LISTS = pytest.mark.parametrize(
    ("command", "package"), [("samplers", dllm.samplers), ("caches", dllm.cache)]
)


@LISTS
def test_everything_registered_has_one_whole_line(cli: Run, command: str, package: Any) -> None:
    lines = cli(command).stdout.splitlines()
    for info in package.available():
        (line,) = [line for line in lines if line.split(" ")[0] == info.name]
        assert line.endswith(info.summary.replace("``", ""))
        assert info.summary.endswith(".") and len(line) < 120, line


@LISTS
def test_one_is_explained(cli: Run, command: str, package: Any) -> None:
    for info in list(package.available())[::6]:
        shown = cli(command, info.name).stdout
        assert shown.startswith(info.name) and info.arxiv in shown and "``" not in shown
        assert shown.count(info.summary.replace("``", "")) == 1
        for name in info.defaults:
            assert name in shown.split("defaults", 1)[1]
        assert "()" not in shown.replace("f()", "")


def test_what_a_sampler_says_of_itself(cli: Run) -> None:
    shown = cli("samplers", "threshold").stdout
    assert "defaults  tau=0.9, n=1" in shown and "needs     probability scores" in shown
    assert "steps (open)" in cli("samplers", "llada").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("samplers", "treshold"), "did you mean 'threshold'"),
        (("samplers", "dual"), "dual is in the other list: dllm caches dual"),
        (("caches", "threshold"), "dllm samplers threshold"),
        (("caches", "duall"), "unknown cache 'duall'; did you mean 'dual'"),
    ],
)
def test_a_name_that_is_not_there(cli: Run, arguments: tuple[str, ...], message: str) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2 and result.stderr.startswith("error: ")
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_every_role_has_a_question() -> None:
    assert set(ROLES) <= set(DECIDES)


def test_the_examples_are_valid() -> None:
    dllm.samplers.compose(SAMPLER_EXAMPLE.split("'")[1])
    dllm.cache.compose(CACHE_EXAMPLE.split("'")[1])
