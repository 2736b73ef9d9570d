"""The card of what was trained to draft: what it is, how it was made, how well it drafts."""

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from ...eval.report import markdown


def curve(history: Sequence[Mapping[str, Any]], blocks: int) -> list[dict[str, float]]:
    """Of a Trainer's log: steps, drafted blocks seen (``blocks`` per step), tokens per forward,
    and how often each draft was accepted."""
    result = []
    for entry in history:
        if "eval_tokens_per_forward" not in entry:
            continue
        point = {"step": entry["step"], "blocks": entry["step"] * blocks,
                 "tokens_per_forward": entry["eval_tokens_per_forward"]}  # fmt: skip
        places = [key for key in entry if key.startswith("eval_reached_")]
        point |= {key.removeprefix("eval_"): entry[key] for key in places}
        result.append(point)
    return result


def card(
    base: str, title: str, about: Sequence[str], settings: Mapping[str, Any],
    points: Sequence[Mapping[str, float]], facts: Mapping[str, Any], **front: Any,
) -> str:  # fmt: skip
    """Markdown.  ``about``: lines under the title; ``settings`` as given to the run, ``facts``:
    what was counted on the way; ``front``: further fields of the front matter."""
    fields = {"base_model": base, "tags": ["dllm", "speculative-decoding"]} | front
    lines = ["---", *(f"{k}: {json.dumps(v)}" for k, v in fields.items()), "---", ""]
    lines += [f"# {title}", "", *about, "", "## Held-out answers, greedy", "", *table(points)]
    lines += ["", "## How it was made", ""]
    lines += [f"- {name}: {value}" for name, value in {**settings, **facts}.items()]
    lines += [f"- {name} {version(name)}" for name in ("torch", "transformers", "accelerate")]
    lines.append(f"- Python {platform.python_version()}, {platform.machine()}")
    return "\n".join(lines) + "\n"


def table(points: Sequence[Mapping[str, float]]) -> list[str]:
    if not points:
        return ["(not evaluated)"]
    places = [key for key in points[0] if key.startswith("reached_")]
    head = ["steps", "blocks seen", "tokens per forward",
            *(f"draft {key.removeprefix('reached_')}" for key in places)]  # fmt: skip
    rows = [[f"{point['step']:.0f}", f"{point['blocks']:.0f}",
             *(f"{point[key]:.2f}" for key in ("tokens_per_forward", *places))]
            for point in points]  # fmt: skip
    return markdown(head, rows).splitlines()
