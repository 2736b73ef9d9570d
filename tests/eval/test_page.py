"""The trace page, as a browser shows it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dllm
from dllm.eval.page import trace_page

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
PROMPT = "Reverse this list: Tom, Anna, Ben, Mia"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same prompt twice: without a cache, and with one."""
    result = []
    for name, how in {
        "plain": {"sampler": "llada(steps=8)", "top_candidates": 3},
        "dual": {"sampler": "llada(steps=12)", "cache": "dual"},
    }.items():
        out = dllm.generate(
            "nano", PROMPT, max_new_tokens=24, block_length=8, trace=True, eos_policy="none", **how
        )
        result.append(tmp_path_factory.mktemp("traces") / f"{name}.json")
        out.trace.save(result[-1])
    return result


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    path = next((p for name in BROWSERS if (p := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser found, looked for {', '.join(BROWSERS)}")
    with api.sync_playwright() as play:
        running = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


def show(browser: Any, page: str, tmp_path: Path) -> tuple[Any, list[str]]:
    """The page in a tab, and what went wrong in it or was fetched by it."""
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    tab, problems = browser.new_page(viewport={"width": 1100, "height": 800}), []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    tab.on("request", lambda r: None if r.url == file.as_uri() else problems.append(r.url))
    tab.goto(file.as_uri())
    return tab, problems


def move(tab: Any, step: int) -> None:
    tab.locator("#step").evaluate(
        "(e, k) => { e.value = k; e.dispatchEvent(new Event('input')) }", step
    )


def count(tab: Any, kind: str) -> int:
    return int(tab.locator(f"#trace-0 .cell.{kind}").count())


@pytest.mark.filterwarnings("ignore")
def test_the_slider_replays_the_canvas(browser: Any, traces: list[Path], tmp_path: Path) -> None:
    trace = json.loads(traces[0].read_text())
    tab, problems = show(browser, trace_page([trace]), tmp_path)
    steps, new = len(trace["steps"]), trace["length"] - len(trace["prompt"])
    assert tab.locator("#at").inner_text() == f"step {steps} of {steps}"
    assert count(tab, "mask") == count(tab, "draft") == 0
    move(tab, 0)
    assert count(tab, "mask") == new and count(tab, "given") == len(trace["prompt"])
    move(tab, 2)
    done = sum(len(step["commits"]) for step in trace["steps"][:2])
    assert count(tab, "fresh") + count(tab, "held") == done
    assert count(tab, "fresh") == len(trace["steps"][1]["commits"])
    assert count(tab, "draft") == len(trace["steps"][1]["drafts"])
    assert "2: " in tab.locator("#trace-0 .now").inner_text()
    tab.keyboard.press("ArrowRight")
    tab.locator("h1").click()
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#at").inner_text().startswith("step 4 ")
    assert not problems
    tab.close()


@pytest.mark.filterwarnings("ignore")
def test_runs_of_end_of_text_are_one_box(browser: Any, traces: list[Path], tmp_path: Path) -> None:
    trace = json.loads(traces[0].read_text())
    end, length = trace["final"][-1], len(trace["final"])
    tail = next(i for i in range(length, 0, -1) if trace["final"][i - 1] != end)
    assert length - tail >= 8  # the answer is short, the canvas is not
    tab, problems = show(browser, trace_page([trace]), tmp_path)
    visible = tab.locator("#trace-0 .cell:visible").all_inner_texts()
    kinds = tab.locator(f"#trace-0 .cell[data-position='{tail}']").inner_text()
    assert len(visible) < length and kinds.rsplit(" ×", 1)[0] == trace["pieces"][str(end)]
    counts = [int(text.rsplit(" ×", 1)[1]) if " ×" in text else 1 for text in visible]
    assert sum(counts) == length
    move(tab, 0)
    assert tab.locator("#trace-0 .cell.folded").count() == 0 and not problems
    tab.close()


@pytest.mark.filterwarnings("ignore")
def test_heat_hover_and_play(browser: Any, traces: list[Path], tmp_path: Path) -> None:
    trace = json.loads(traces[0].read_text())
    tab, problems = show(browser, trace_page([trace]), tmp_path)
    cell = tab.locator("#trace-0 .cell.held:not(.folded)").last
    colours = []
    for heat in ("step", "confidence", "plain"):
        tab.locator("#heat").select_option(heat)
        colours.append(cell.evaluate("e => e.style.background"))
    assert len(set(colours)) == 3
    cell.hover()
    tip = tab.locator("#tip").inner_text()
    position = int(cell.get_attribute("data-position"))
    assert tip.startswith(f"position {position}") and "decided in step" in tip
    assert tip.count(" %") == 4  # its probability and three candidates
    move(tab, 0)
    tab.locator("#speed").select_option("50")
    tab.locator("#play").click()
    tab.wait_for_function(f"document.getElementById('step').value == {len(trace['steps'])}")
    assert tab.locator("#play").inner_text().endswith("play")
    assert not problems
    tab.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_traces_and_what_caches_compute(
    browser: Any, traces: list[Path], tmp_path: Path
) -> None:
    both = [json.loads(file.read_text()) for file in traces]
    tab, problems = show(browser, trace_page(both), tmp_path)
    boxes = [tab.locator(f"#trace-{i}").bounding_box() for i in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
    frozen = next(i for i, step in enumerate(both[1]["steps"]) if not step["refresh"])
    move(tab, frozen + 1)
    assert (
        f"{both[1]['steps'][frozen]['computed']} positions"
        in tab.locator("#trace-1 .now").inner_text()
    )
    outside = tab.locator("#trace-1 .cell").first  # of the prompt: frozen by the dual cache
    outside.hover()
    assert "read from the cache" in tab.locator("#tip").inner_text()
    assert tab.locator("#trace-1 canvas").evaluate("e => e.width * e.height") > 1000
    assert not problems
    tab.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_text_around_holes_is_given(browser: Any, tmp_path: Path) -> None:
    out = dllm.infill("nano", "Tom, [[1]], Ben, [[1]], Mia", trace=True)
    tab, problems = show(browser, trace_page([json.loads(out.trace.to_json())]), tmp_path)
    move(tab, 0)
    assert count(tab, "mask") == 2
    assert count(tab, "given") == len(out.sequences) - 2 and not problems
    tab.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_tokens_cannot_leave_the_data(browser: Any, traces: list[Path], tmp_path: Path) -> None:
    trace = json.loads(traces[0].read_text())
    evil = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
    trace["pieces"] = dict.fromkeys(trace["pieces"], evil)
    tab, problems = show(browser, trace_page([trace], title="<b>&"), tmp_path)
    assert tab.evaluate("window.hit") is None and not problems
    assert tab.locator("#trace-0 .cell.held").first.inner_text() == evil
    assert tab.title() == "<b>&"
    tab.close()
