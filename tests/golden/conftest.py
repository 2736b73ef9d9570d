"""Where the recorded outputs of the official implementations are."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


def goldens_dir() -> Path:
    """``DLLM_GOLDENS`` if set, else the copy in the repository.

    It holds ``forward/``, ``traces/`` and one folder per tiny model.
    """
    return Path(os.environ.get("DLLM_GOLDENS") or Path(__file__).parent / "data")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases are told by name in reports.  With ``-n``, those that are decoded together go to the
    same worker."""
    for item in items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if isinstance(case, dict) and "id" in case:
            item.user_properties.append(("case", case["id"]))
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        together = getattr(getattr(item, "module", None), "TOGETHER", None)
        if together is not None and hasattr(item, "callspec") and "case" in item.callspec.params:
            group = together.group(item.callspec.params["case"])
            item.add_marker(pytest.mark.xdist_group(f"{item.module.__name__} {group}"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Cases that are deselected are not decoded beside the others."""
    for item in session.items:
        together = getattr(getattr(item, "module", None), "TOGETHER", None)
        if together is not None and hasattr(item, "callspec") and "case" in item.callspec.params:
            together.chosen.add(item.callspec.params["case"]["id"])


@pytest.fixture(scope="session")
def goldens() -> Path:
    return goldens_dir()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Of a folder that was asked for: what became of every set of cases in it."""
    if "DLLM_GOLDENS" not in os.environ:
        return
    from .recorded import sets

    found: dict[str, str] = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            properties = dict(getattr(report, "user_properties", ()))
            if "case" in properties:
                equal = "in part" if "in part" in properties else "equal"
                found[properties["case"]] = equal if outcome == "passed" else "different"
    terminalreporter.section("recorded cases")
    for name, cases in sets().items():
        count = Counter(found.get(case["id"], "not mapped") for case in cases)
        line = ", ".join(f"{number} {kind}" for kind, number in sorted(count.items()))
        terminalreporter.line(f"{name}: {len(cases)} cases, {line}")
