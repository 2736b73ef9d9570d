"""Figures in README and on the front of the documentation are those of the last runs."""

import importlib
import json
import re
from pathlib import Path

import pytest

import dllm
from dllm.samplers import SAMPLERS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODELS = (ROOT / "docs/reference/models.md").read_text(encoding="utf-8")


def table(text: str, heading: str) -> int:
    """Rows of the table below a heading."""
    return len(re.findall(r"^\| (?!-)", text.split(heading, 1)[1].split("\n#", 1)[0], re.M)) - 1


def test_memory_and_speed_of_the_8b_shape() -> None:
    found = json.loads((ROOT / "benchmarks/results/eight_billion.json").read_text("utf-8"))
    runs = {case["way"]: case for case in found["cases"] if case["cache"] == "dual"}
    said = re.findall(
        r"(bfloat16|int8|int4) (?:takes )?([\d.]+) GB and (?:writes )?(\d+\.\d)",
        README.replace("\n", " "),
    )
    assert len(said) == 3 and found["machine"]["vector"] == "AVX512" and "AVX-512" in README
    for name, memory, speed in said:
        assert memory == f"{runs[name]['memory']['peak']:.1f}"
        assert speed == f"{runs[name]['tokens_per_second']:.1f}"


def test_models_and_samplers_are_counted() -> None:
    checkpoints, families = re.search(r"\[(\d+) checkpoints of (\d+) families\]", README).groups()
    assert int(checkpoints) == table(MODELS, "## Checkpoints")
    assert int(families) == table(MODELS, "## Families")
    assert f"| models | {families} families |" in README
    pages = [p for p in (ROOT / "docs/samplers").glob("*.md") if p.stem != "index"]
    claimed = set(re.findall(r"(?:any of|samplers \|) (\d+)", README))
    assert claimed == {str(len(pages))} and all(p.stem in SAMPLERS for p in pages)


@pytest.mark.parametrize(
    "sampler, passes", re.findall(r"^\| `(\w+)`: [^|]+\| (\d+) \|", README, re.M)
)
def test_passes_of_the_first_command(sampler: str, passes: str) -> None:
    question = re.search(r'-s localleap "([^"]+)"', README)[1]
    assert dllm.generate("nano", question, sampler=sampler).nfe == int(passes)


def test_every_figure_names_its_command_and_its_last_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pages = importlib.import_module("pages")
    assert pages.evidence() in (ROOT / "docs/results/index.md").read_text("utf-8")
    assert {file for *_, file in pages.EVIDENCE} <= {
        file.name for file in (ROOT / "benchmarks/results").iterdir()
    }
    for _, _, command, _ in pages.EVIDENCE:
        if command.startswith("python "):
            assert (ROOT / command.split()[1]).is_file()
