"""Traces as one self-contained HTML page: nothing is loaded from anywhere."""

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from ..core.errors import ConfigError

MOST = 2  # traces that fit side by side


def trace_page(traces: Sequence[dict[str, Any]], title: str = "dllm trace") -> str:
    """The page: a canvas per trace with one slider, heat, hover, and what each step computed."""
    if not 1 <= len(traces) <= MOST:
        raise ConfigError(f"a page shows one trace or two side by side, not {len(traces)}")
    return render(traces, title)


def render(
    traces: Sequence[dict[str, Any]], title: str, form: str = "", style: str = "", script: str = ""
) -> str:
    """The renderer with ``traces`` in it.  ``form`` (HTML above the slider), ``style`` (CSS) and
    ``script`` (run at the end) are for pages that bring more; all three are trusted."""
    page = (files(__package__) / "trace.html").read_text(encoding="utf-8")
    data = json.dumps(list(traces), ensure_ascii=False, separators=(",", ":"))
    # Inside a script element only "</" and "<!" end or change anything.
    data = data.replace("<", "\\u003c")
    page = page.replace("<title>dllm trace", f"<title>{html.escape(title)}")
    parts = {"/*STYLE*/": style, "<!--FORM-->": form, "/*SCRIPT*/": script, "/*DATA*/": data}
    for place, part in parts.items():  # the data last: what stands in it is never replaced
        page = page.replace(place, part, 1)
    return page
