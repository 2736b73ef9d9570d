"""The page at ``/``, as a browser shows it: written live, stepped back, narrow, by keyboard."""

import json
import re
from importlib.resources import files
from typing import Any

import pytest

import dllm
from tests.eval.test_page import browser as browser

from .conftest import Served, Start

EXAMPLE = "Tom has 23 apples. Tom buys 12 more. Then Tom loses 7. How many apples does Tom have?"
PROMPT = "Reverse this list: Tom, Anna, Ben, Mia"
pytestmark = pytest.mark.filterwarnings("ignore")


def test_it_is_one_file(served: Served) -> None:
    page = served.get("/")
    assert page.status_code == 200 and "text/html" in page.headers["content-type"]
    assert "http://" not in page.text and "https://" not in page.text
    assert page.text.count("<script") == 2 and "/*SCRIPT*/" not in page.text
    asked = re.findall(r"""(?:call|fetch)\("(.*?)\"""", page.text)  # relative, for proxies
    assert asked and all(served.get(f"/{path}").status_code in (200, 405) for path in asked)


def test_it_can_be_left_out(start: Start, tiny: dllm.DiffusionModel) -> None:
    assert start(tiny, page=False).get("/").status_code == 404


@pytest.mark.slow
def test_it_opens_with_runs_as_they_are_today() -> None:
    for run in json.loads((files("dllm.serve.page") / "example.json").read_text("utf-8")):
        out = dllm.generate("nano", EXAMPLE, max_new_tokens=48, block_length=16,
                            sampler=run["sampler"], trace=True)  # fmt: skip
        now = json.loads(out.trace.to_json())
        assert now["prompt"] == run["prompt"] and now["final"] == run["final"]
        for was, is_ in zip(run["steps"], now["steps"], strict=True):
            assert [c[:2] for c in was["commits"]] == [c[:2] for c in is_["commits"]]


def open_page(browser: Any, served: Served, width: int, height: int) -> tuple[Any, list[str]]:
    tab, problems = browser.new_page(viewport={"width": width, "height": height}), []
    tab.set_default_timeout(90_000)  # a busy machine
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    tab.on(
        "request", lambda r: None if r.url.startswith(served.url) else problems.append(r.url)
    )  # fmt: skip
    tab.goto(served.url)
    tab.wait_for_function("document.querySelectorAll('select.cache option').length == 4")
    tab.locator("summary").click()
    tab.locator("#max_tokens").fill("24")
    tab.locator("#block_length").fill("8")
    tab.locator("#pause").fill("0")
    return tab, problems


def done(tab: Any) -> None:
    tab.wait_for_function("!document.getElementById('go').disabled", timeout=90_000)


@pytest.mark.slow
def test_two_methods_side_by_side(browser: Any, served: Served, tiny: dllm.DiffusionModel) -> None:
    tab, problems = open_page(browser, served, 1200, 900)
    tab.locator("#prompt").fill(PROMPT)
    tab.locator("#compare").check()
    tab.locator(".sampler").nth(1).fill("llada(steps=24)")
    tab.locator(".cache").nth(1).select_option("dual")
    tab.locator("#go").click()
    done(tab)
    methods = [{"sampler": "threshold"}, {"sampler": "llada(steps=24)", "cache": "dual"}]
    for i, method in enumerate(methods):
        plain = dllm.generate(tiny, PROMPT, max_new_tokens=24, block_length=8, **method)
        shown = tab.locator("#answers p").nth(i).text_content()
        assert shown.split() == plain.text.split()
        assert f"{plain.nfe} forwards" in tab.locator("#answers small").nth(i).inner_text()
        assert f"{plain.nfe} forwards" in tab.locator(f"#trace-{i} .about").inner_text()
    boxes = [tab.locator(f"#trace-{i}").bounding_box() for i in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
    assert tab.locator("#at").inner_text() == "step 24 of 24"
    tab.locator("h1").click()
    tab.keyboard.press("ArrowLeft")
    assert tab.locator("#at").inner_text() == "step 23 of 24"
    assert tab.locator("#trace-1 .cell.fresh").count() == 1
    assert "running" in tab.locator("#queue").inner_text()
    assert not problems
    tab.close()


@pytest.mark.slow
def test_keyboard_and_a_narrow_screen(browser: Any, served: Served) -> None:
    tab, problems = open_page(browser, served, 360, 720)
    tab.locator("#prompt").focus()
    tab.keyboard.press("Control+Enter")
    done(tab)
    assert tab.locator("#answers p").count() == 1
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    reached = set()
    tab.locator("#prompt").focus()
    for _ in range(20):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"sampler", "cache", "compare", "go", "play", "step", "heat"} <= reached
    assert not problems
    tab.close()


@pytest.mark.slow
def test_trouble_is_shown_and_stopping_works(browser: Any, served: Served) -> None:
    tab, _ = open_page(browser, served, 900, 700)
    tab.locator(".sampler").first.fill("thresold")
    tab.locator("#go").click()
    tab.wait_for_selector("#trouble:not([hidden])")
    assert "did you mean" in tab.locator("#trouble").inner_text()
    tab.locator("#compare").check()  # the other method is not held up, and keeps its name
    tab.locator(".sampler").nth(1).fill("llada(steps=24)")
    tab.locator("#go").click()
    done(tab)
    assert tab.locator("#trouble").inner_text().startswith("thresold: ")
    assert "thresold" in tab.locator("#trace-0 h2").inner_text()
    assert "24 forwards" in tab.locator("#trace-1 .about").inner_text()
    tab.locator("#compare").uncheck()
    tab.locator("#new").click()
    tab.locator("#prompt").fill(PROMPT)
    tab.locator("#length").fill("apend")
    tab.locator(".sampler").first.fill("fixed(n=1)")
    tab.locator("#go").click()
    tab.wait_for_selector("#trouble:not([hidden])")
    assert "did you mean 'append'" in tab.locator("#trouble").inner_text()
    tab.locator("#length").fill("append(block=8)")
    tab.locator("#max_tokens").fill("64")
    tab.locator("#pause").fill("500")
    tab.locator("#go").click()
    tab.wait_for_selector("#trace-0")
    assert "append" in tab.locator("#trace-0 h2").inner_text()
    tab.locator("#halt").click()
    done(tab)
    assert tab.locator("#trouble").is_hidden()
    tab.close()


@pytest.mark.slow
def test_an_example_to_play_then_a_chat(
    browser: Any, served: Served, tiny: dllm.DiffusionModel
) -> None:
    tab, problems = open_page(browser, served, 1200, 900)
    assert "recorded example" in tab.locator("#shown").inner_text()
    assert tab.locator("#at").inner_text() == "step 48 of 48"
    assert tab.locator("#trace-0 .cell.held").count() > 20
    tab.locator("#speed").select_option("50")
    tab.locator("#play").click()
    tab.wait_for_function("document.getElementById('step').value == 5")
    tab.locator("#play").click()
    assert "threshold" in tab.locator("#trace-0 h2").inner_text()
    how: Any = {"max_new_tokens": 24, "block_length": 8, "sampler": "threshold"}
    chat = [{"role": "user", "content": PROMPT}]
    tab.locator("#prompt").fill(PROMPT)
    tab.locator("#go").click()
    done(tab)
    assert tab.locator("#shown").is_hidden() and tab.locator("#prompt").input_value() == ""
    first = tab.locator("#answers p").text_content()
    assert first.split() == dllm.generate(tiny, [chat], **how)[0].text.split()
    tab.locator("#seed").fill("3")  # the same message, another seed
    tab.locator("#temperature").fill("1")
    tab.locator("#again").click()
    done(tab)
    again = tab.locator("#answers p").text_content()
    assert (
        again.split() == dllm.generate(tiny, [chat], seed=3, temperature=1.0, **how)[0].text.split()
    )
    tab.locator("#temperature").fill("0")
    tab.locator("#prompt").fill("And now?")
    tab.keyboard.press("Control+Enter")
    done(tab)
    chat += [{"role": "assistant", "content": again}, {"role": "user", "content": "And now?"}]
    second = tab.locator("#answers p").text_content()
    assert second.split() == dllm.generate(tiny, [chat], **how)[0].text.split()
    assert tab.locator("#turns p").all_text_contents() == [turn["content"] for turn in chat]
    tab.locator("#new").click()
    assert tab.locator("#turns p").count() == tab.locator("#answers p").count() == 0
    assert not problems
    tab.close()
