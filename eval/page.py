"""Traces as one self-contained HTML page: nothing is loaded from anywhere."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import ConfigError

FORMAT = 1  # of dllm.trace
KEYS = {"prompt": list, "length": int, "region": list, "sampler": str, "cache": str, "model": str,
        "steps": list, "final": list, "pieces": dict}  # fmt: skip
STEP_KEYS = {"window", "commits", "remasked", "computed", "compute", "read", "drafts", "candidates"}
MOST = 2  # traces that fit side by side


def read_trace(path: Path) -> dict[str, Any]:
    """A trace that ``dllm generate --trace`` or `Trace.save` wrote."""
    if path.is_char_device() or path.is_block_device():  # these may never end
        raise ConfigError(f"{path} is a device and not a trace: write one with --trace")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a trace: it is not JSON ({error})") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise ConfigError(f"{path} is not a trace of format {FORMAT}: write it with --trace")
    lacking = KEYS.keys() - result.keys()
    wrong = {key for key, kind in KEYS.items() if not isinstance(result.get(key, kind()), kind)}
    steps = [] if {"steps"} & (lacking | wrong) else result["steps"]
    if not all(isinstance(step, dict) for step in steps):
        wrong, steps = wrong | {"steps"}, []
    lacking |= {key for step in steps for key in STEP_KEYS - set(step)}
    if wrong:
        raise ConfigError(f"the trace {path} has other things than expected in {_list(wrong)}")
    if lacking:
        raise ConfigError(f"the trace {path} lacks {_list(lacking)}")
    return result


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))


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
