"""The page at ``/``: the renderer of traces, fed by a running server."""

import json
from functools import cache
from importlib.resources import files

from ...eval.page import render


@cache
def page() -> str:
    """One HTML file that loads nothing from anywhere else.  It opens with the two recorded runs of
    ``example.json``, so that there is something to play before the model has written anything."""
    here = files(__package__)
    form, style, script = (
        (here / name).read_text(encoding="utf-8")
        for name in ("form.html", "style.css", "script.js")
    )
    example = json.loads((here / "example.json").read_text(encoding="utf-8"))
    return render(example, "dllm", form, style, script).replace(
        "<h1>What happened at each step</h1>", "<h1>dllm</h1>"
    )
