"""What a sweep is summed up with: tables and plots of made-up records."""

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


def test_differences_are_tested_against_one_token_per_step() -> None:
    """40 against 30 right of 40 on the same prompts: ten to none, p = 2 / 2**10, twice by Holm."""
    made = [fake("a", "llada", 40, 8), fake("a", "worse", 30, 4), fake("a", "same", 40, 2)]
    rows = {line.split("|")[2].strip(): line for line in report.full_table(made).splitlines()[2:]}
    cells = [cell.strip() for cell in rows["`worse`"].split("|")]
    assert cells[5].startswith("-25.0 (-40.") and cells[6] == f"{2 * 2 / 2**10:.3f}" == "0.004"
    assert "| +0.0 (-8.8 to +8.8) | 1.00 |" in rows["`same`"] and "| – | – |" in rows["`llada`"]


def test_a_bar_in_a_name_ends_no_cell() -> None:
    head, _, row = report.full_table([fake("a|b.jsonl", "llada", 40, 8)]).splitlines()
    assert row.startswith("| a\\|b.jsonl | `llada` |")
    assert row.count("|") - 1 == head.count("|")


def test_a_cache_is_tested_against_none() -> None:
    base = fake("a", "threshold", 40, 4)
    cached = replace(fake("a", "threshold", 28, 4), cache="dual", key="dual")
    row = report.cache_table([base, cached]).splitlines()[2]
    assert row.startswith("| `threshold` | `dual` | -30.0 (") and "| <0.001 |" in row


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_plot_names_no_more_than_can_be_told_apart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from dllm.eval.plot import MOST, named, pareto

    few = [fake("a", f"m{i}", 40, 8 - i) for i in range(3)]
    assert named(few) == ["m0", "m1", "m2"]
    many = [fake("a", "llada", 100, 20, 100), fake("a", "bad", 10, 1, 100)]
    many += [fake("a", f"m{i}", 100, 18 - i, 100) for i in range(14)]
    result = named(many)
    assert len(result) == MOST and result[-1] == "llada"
    assert result[:-1] == [f"m{i}" for i in range(13, 4, -1)]  # the fastest that are right
    ties = [replace(r, nfe=[64] * 100) for r in many]
    first = sorted(f"m{i}" for i in range(14))[:9]
    assert named(ties) == named(ties[::-1]) == [*first, "llada"]
    assert named([replace(r, task=f"t{i}") for i, r in enumerate(many)]) == ["llada"]
    file = tmp_path / "p.svg"
    pareto(many, [file])
    assert ">m13<" in file.read_text() and ">m4<" not in file.read_text()
    assert file.read_text().count(">others<") == 1
