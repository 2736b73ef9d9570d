"""What a sweep is summed up with: tables, areas and plots of made-up records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dllm.eval import report
from dllm.eval.measure import Record


def fake(task: str, sampler: str, right: int, nfe: int, n: int = 40) -> Record:
    method, solved = sampler.split("(")[0], [i < right for i in range(n)]
    key = f"{task} {sampler}"
    return Record(key, "m", task, method, sampler, "none", {}, n, 0, 8, solved, [8] * n,
                  [nfe] * n, [9 * nfe] * n, 0, 0.1 * nfe, 1)  # fmt: skip


def test_the_fastest_setting_is_shown_to_be_as_good() -> None:
    """Within five points at the lower end of the interval: `fast(3)` may be worse, `bad` is."""
    kinds = {"slow": (38, 8), "fast(1)": (38, 4), "fast(2)": (38, 2), "fast(3)": (36, 1),
             "bad": (10, 1)}  # fmt: skip
    made = [fake(task, name, *kind) for task in ("a", "b") for name, kind in kinds.items()]
    lines = report.fastest_table([*made, fake("a", "once", 40, 1)]).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines[:2]] == ["`fast(2)`", "`slow`"]
    assert lines[2:] == ["", "No such setting: `bad`."]
    assert "4.00" in lines[0] and "4.0×" in lines[0] and "| 1.00 |" in lines[0]


def test_areas_begin_at_the_same_point() -> None:
    """A sweep that starts late gets a trapezoid from the slowest point, not a rectangle."""
    made = [fake("a", "slow", 40, 8), fake("a", "late", 40, 2)]
    lines = report.area_table(made).splitlines()[2:]
    result = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines}
    assert result == {"`late`": "**400** (400–400)", "`slow`": "**100** (100–100)"}
    worse = [*made[:1], fake("a", "late", 30, 2)]
    assert "`late` | **100** (" in report.area_table(worse)


@pytest.mark.parametrize("nfe", [16, 8])
def test_what_is_no_faster_does_not_move_the_beginning(nfe: int) -> None:
    """A bad slow setting would lower the floor and let the worse fast one in."""
    base = fake("a", "llada", 40, 8)
    fast, slower = fake("a", "poor(1)", 30, 2), fake("a", "poor(2)", 20, nfe)
    result = report.areas([base, fast, slower])["poor"]
    assert result.values == (100.0,) and set(result.draws[0]) == {100.0}


def test_areas_are_compared_with_that_of_threshold() -> None:
    made = [fake("a", "llada", 40, 8), fake("a", "threshold", 40, 4), fake("a", "fast", 40, 2)]
    lines = report.area_table(made).splitlines()
    assert "against `threshold`" in lines[0]
    assert "+200 (+200 to +200)" in lines[2] and "`fast`" in lines[2]
    assert [cell.strip() for cell in lines[3].split("|")][1:4:2] == ["`threshold`", "–"]


def test_differences_are_tested_against_one_token_per_step() -> None:
    """40 against 30 right of 40 on the same prompts: ten to none, p = 2 / 2**10, twice by Holm."""
    made = [fake("a", "llada", 40, 8), fake("a", "worse", 30, 4), fake("a", "same", 40, 2)]
    rows = {line.split("|")[2].strip(): line for line in report.full_table(made).splitlines()[2:]}
    cells = [cell.strip() for cell in rows["`worse`"].split("|")]
    assert cells[5].startswith("-25.0 (-40.") and cells[6] == f"{2 * 2 / 2**10:.3f}" == "0.004"
    assert "| +0.0 (-8.8 to +8.8) | 1.00 |" in rows["`same`"] and "| – | – |" in rows["`llada`"]


def test_a_cache_is_tested_against_none() -> None:
    base = fake("a", "threshold", 40, 4)
    cached = replace(fake("a", "threshold", 28, 4), cache="dual", key="dual")
    row = report.cache_table([base, cached]).splitlines()[2]
    assert row.startswith("| `threshold` | `dual` | -30.0 (") and "| <0.001 |" in row


@pytest.mark.filterwarnings("ignore")
def test_a_plot_names_no_more_than_can_be_told_apart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from dllm.eval.plot import MOST, named, pareto

    few = [fake("a", f"m{i}", 40, 8 - i) for i in range(3)]
    assert named(few) == ["m0", "m1", "m2"]
    many = [fake("a", name, 40, 20 - i) for i, name in enumerate(("llada", "threshold"))]
    many += [fake("a", f"m{i}", 40, 18 - i) for i in range(14)]
    result = named(many)
    assert len(result) == MOST and result[-2:] == ["llada", "threshold"]
    assert result[:-2] == [f"m{i}" for i in range(13, 5, -1)]  # the fastest, so largest areas
    ties = [replace(r, nfe=[64] * 40) for r in many]
    first = sorted(f"m{i}" for i in range(14))[:8]
    assert named(ties) == named(ties[::-1]) == [*first, "llada", "threshold"]
    file = tmp_path / "p.svg"
    pareto(many, [file])
    assert ">m13<" in file.read_text() and ">m5<" not in file.read_text()
    assert file.read_text().count(">others<") == 1
