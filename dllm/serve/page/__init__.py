"""The page at ``/``: the renderer of traces, fed by a running server."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from ...eval.page import render


@cache
def page() -> str:
    """One HTML file that loads nothing from anywhere else."""
    here = files(__package__)
    form, style, script = (
        (here / name).read_text(encoding="utf-8")
        for name in ("form.html", "style.css", "script.js")
    )
    return render([], "dllm", form, style, script).replace(
        "<h1>What happened at each step</h1>", "<h1>dllm</h1>"
    )
