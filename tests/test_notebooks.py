"""What notebooks show of a run, and the notebooks of the examples."""

import re
from pathlib import Path
from typing import Any

import pytest

import dllm
from dllm.runtime.trace import Cell, canvas_html

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
CELL = re.compile(r"<span title='([^']*)' style='([^']*)'>([^<]*)</span>")
LIST = "Copy this list: Tom, Anna"


def test_cells_are_escaped_and_long_runs_are_one() -> None:
    page = canvas_html([Cell("<b>", 0.0), Cell("2"), Cell("2"), *[Cell("∎", 1.0)] * 5], "a < b")
    assert [text for _, _, text in CELL.findall(page)] == ["&lt;b&gt;", "2", "2", "∎ ×5"]
    assert page.endswith("<small>a &lt; b</small>")


def test_later_cells_are_darker() -> None:
    page = canvas_html([Cell("a", 0.0), Cell("b", 1.0), Cell("c")], "")
    assert re.findall(r"background:([^;]*)", page) == [
        "hsl(212 60% 93%)", "hsl(212 60% 58%)", "#d8d8d8"
    ]  # fmt: skip


def test_a_trace_shows_the_step_of_every_token() -> None:
    out = dllm.generate("nano", LIST, sampler="llada", max_new_tokens=12, trace=True)
    assert out.trace is not None
    steps = [title for title, _, text in CELL.findall(out.trace._repr_html_()) if "×" not in text]
    assert steps[: len(out.tokens) - 1] == [f"step {n + 1}" for n in out.order[:-1]]


def test_given_text_is_shown_between_holes() -> None:
    out = dllm.infill("nano", "4 + 5 =[[1]].", prompt="What is 4 + 5?", trace=True)
    assert out.trace is not None
    cells = CELL.findall(out.trace._repr_html_())
    assert [title for title, _, _ in cells].count("step 1") == 1
    assert {title for title, _, _ in cells} == {"given", "step 1"}


def test_an_event_shows_drafts_and_masks() -> None:
    options = {"sampler": "llada", "max_new_tokens": 8, "block_length": 4}
    pages = [event._repr_html_() for event in dllm.stream("nano", LIST, **options)]
    first = CELL.findall(pages[0])
    assert [title for title, _, _ in first].count("step 1") == 1
    assert "italic" in first[0][1] or "italic" in first[1][1]  # the rest of the first block
    assert first[-1][2] == "░ ×4"  # the second block, for which nothing was proposed
    assert "undecided" not in pages[-1]


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("ipykernel")
    client = pytest.importorskip("nbclient")
    notebook: Any = pytest.importorskip("nbformat").read(file, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not kept in git"
    resources = {"metadata": {"path": tmp_path}}
    client.NotebookClient(notebook, timeout=300, resources=resources).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert shown and all(output.output_type != "error" for output in shown)
    assert file.stem == "drafting" or any("text/html" in o.get("data", {}) for o in shown)
