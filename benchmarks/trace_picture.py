"""Draw docs/trace.png: two traces of one prompt, as a browser shows their page.

    python benchmarks/trace_picture.py

Needs playwright and a Chromium on the search path.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import dllm
from dllm.eval.page import trace_page

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
WAYS = {"none": "threshold(tau=0.999)", "dual": "llada(steps=12)"}
PROMPT = "Tom has 23 apples. Tom buys 12 more. How many apples does Tom have?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/trace.png"))
    parser.add_argument("--step", type=int, default=7)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    traces = []
    for cache, sampler in WAYS.items():
        out = dllm.generate(
            "nano", PROMPT, sampler=sampler, cache=cache, max_new_tokens=48, block_length=16,
            trace=True, top_candidates=4,
        )  # fmt: skip
        traces.append(json.loads(out.trace.to_json()))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        page = Path(folder) / "page.html"
        page.write_text(trace_page(traces), encoding="utf-8")
        path = next(p for name in BROWSERS if (p := shutil.which(name)))
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page(
            viewport={"width": 1100, "height": 480},
            color_scheme="dark" if options.dark else "light",
        )
        tab.goto(page.as_uri())
        tab.locator("#step").evaluate(
            "(e, k) => { e.value = k; e.dispatchEvent(new Event('input')) }", options.step
        )
        tab.locator("#trace-1 .cell.held:not(.folded)").nth(12).hover()
        tab.screenshot(path=options.output)
        browser.close()


if __name__ == "__main__":
    main()
