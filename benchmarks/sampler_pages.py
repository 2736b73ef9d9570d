"""The pages of samplers: docstring, parameters, what each costs, and a picture of its order."""

from __future__ import annotations

import dataclasses
import html
import inspect
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import dllm
from dllm.core.capabilities import BLOCK_CAUSAL
from dllm.eval.report import markdown
from dllm.samplers import SAMPLERS

FOLDER = Path(__file__).parents[1] / "docs" / "samplers"
PROMPT = "Tom has 23 apples. Tom buys 12 more. Then Tom loses 7. How many apples does Tom have?"
BLOCK = 8
# name -> (a complete sampler, when to use it)
PAGES = {
    "llada": ("llada", "As the reference: one token per step."),
    "dream": ("dream", "As the reference for Dream checkpoints, with their published schedule."),
    "threshold": ("threshold", "As the default."),
    "factor": ("factor", "Instead of `threshold`, with no probability to tune."),
    "eb": ("eb", "For a bound on the joint error of a step."),
    "dparallel": ("dparallel", "With dParallel's distilled checkpoints."),
    "d3llm": ("d3llm", "With d3LLM's distilled checkpoints and cache `delayed`."),
    "d2f": ("d2f", "With D2F's checkpoints and cache `d2f`, alone or as `lopa(d2f)`."),
    "localleap": ("localleap", "For fewer forward passes than `threshold` in text whose tokens "
                  "depend on their neighbours."),
    "hierarchical": ("hierarchical", "With large blocks: it spreads commits over the gaps."),
    "r2": ("r2", "For repetitive text, and with R2-dLLM's checkpoints."),
    "credit": ("threshold+credit", "For answers that the model prefers by a small margin."),
    "adablock": ("adablock", "For structured text: blocks end where lines and steps end."),
    "dcd": ("dcd", "When errors gather at the borders of blocks."),
    "dsb": ("dsb", "As `dcd`, with less state."),
    "prophet": ("prophet", "For short answers that are clear early. Check the accuracy first."),
    "ete": ("ete", "Where `threshold` falls back to one token per step."),
    "lopa": ("lopa", "When a forward pass of several sequences costs little more than one."),
    "freedave": ("freedave", "For exactly the text of one token per step."),
    "edit": ("edit", "With LLaDA2.1 and other checkpoints trained to edit."),
    "s2d2": ("s2d2", "With block-diffusion models (SDAR, LLaDA2) and cache `block`."),
    "remdm": ("remdm", "For better text at more forward passes."),
    "wedlm": ("wedlm", "For text that streams from left to right."),
}  # fmt: skip


def sampler_pages(measured: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """Every page of a sampler, its picture, and the index; ``measured`` is of `samplers.json`."""
    model = dllm.load("nano")
    rows = []
    for name, (spec, advice) in PAGES.items():
        cls, order, forwards = SAMPLERS[name], "", "–"
        if BLOCK_CAUSAL not in cls().needs:
            result, options = example(model, spec)
            yield FOLDER / f"{name}.svg", picture(model, result)
            order = f"## Order\n\n`dllm generate PROMPT{options}`\n\n![commit order]({name}.svg)\n"
            forwards = str(result.nfe)
        text = re.sub(r"``([^`]*)``", r"`\1`", inspect.cleandoc(cls.__doc__ or ""))
        link = f"[{cls.arxiv}](https://arxiv.org/abs/{cls.arxiv})" if cls.arxiv else ""
        yield FOLDER / f"{name}.md", "\n\n".join(part for part in (
            f"# {name}", text, f"**Use it** {advice[0].lower()}{advice[1:]}",
            f"**Source** {cls.paper}{f', arXiv {link}' if link else ''}" if cls.paper else "",
            f"**Needs** {', '.join(sorted(map(str, cls().needs)))}" if cls().needs else "",
            parameters(cls), cost(measured, spec), order,
        ) if part).rstrip() + "\n"  # fmt: skip
        first = text.partition("\n\n")[0].splitlines()[0]
        rows.append([f"[`{name}`]({name}.md)", first, link, forwards])
    table = markdown(["sampler", "rule", "arXiv", "forward passes"], rows)
    yield FOLDER / "index.md", INDEX + table + "\n"


INDEX = f"""# Samplers

A bare name is the complete method of its paper.  `dllm samplers NAME` shows its parameters, `+`
combines parts ([guide](../choose-a-sampler.md)).  The last column counts the forward passes of this
command, whose pictures are on the pages:

```
dllm generate --block-length {BLOCK} -s SAMPLER "{PROMPT}"
```

"""


def parameters(cls: Any) -> str:
    """What a sampler takes, and its defaults; one that is open is told in the text above."""
    rows = [
        [f"`{field.name}`", "see above" if default in (None, ()) else f"`{default}`"]
        for field in dataclasses.fields(cls)
        if not dataclasses.is_dataclass(default := getattr(cls(), field.name))
        and field.name != "vocab_size"  # the model's
    ]
    return markdown(["parameter", "default"], rows) if rows else ""


def cost(result: dict[str, Any], spec: str) -> str:
    """One line of `results/samplers.json`."""
    tasks = result["samplers"].get(spec, {}).get("tasks")
    if not tasks:
        return ""
    base = result["samplers"][result["baseline"]]["tasks"]
    points = 100 * fmean(row["accuracy"] - base[task]["accuracy"] for task, row in tasks.items())
    passes = fmean(row["nfe"] / base[task]["nfe"] for task, row in tasks.items())
    return (
        f"**Cost** on `nano`, {len(tasks)} tasks: {points:+.1f} points of accuracy and "
        f"{passes:.2f}× the forward passes of `threshold` ([table](../results/samplers.md))."
    )


def example(model: dllm.DiffusionModel, spec: str) -> tuple[dllm.Result, str]:
    """The example in blocks of `BLOCK`, or as the sampler has it where it knows no blocks."""
    options = f' -s "{spec}"'
    try:
        result = dllm.generate(model, PROMPT, sampler=spec, block_length=BLOCK)
        return result, f"{options} --block-length {BLOCK}"
    except dllm.ConfigError:
        return dllm.generate(model, PROMPT, sampler=spec), options


def picture(model: dllm.DiffusionModel, result: dllm.Result) -> str:
    """Commit order as SVG: a cell per token, darker is later.  Cells bring their own background, so
    that they are legible on light and dark pages; six of them fit a phone."""
    decode = partial(model.tokenizer.decode, skip_special_tokens=True)
    per_line, width, height, cells = 6, 62, 34, []
    last = max(max(result.order), 1)
    for i, (step, token) in enumerate(zip(result.order, result.tokens, strict=True)):
        x, y, piece = i % per_line * width, i // per_line * height, decode([token]) or "∎"
        cells.append(
            f'<rect x="{x}" y="{y}" width="{width - 2}" height="{height - 2}" rx="3" '
            f'fill="hsl(212 60% {93 - 35 * step / last:.0f}%)"/>'
            f'<text x="{x + width / 2 - 1}" y="{y + 14}" text-anchor="middle">'
            f"{html.escape(piece.strip() or '␣')}</text>"
            f'<text x="{x + width / 2 - 1}" y="{y + 27}" text-anchor="middle" font-size="9">'
            f"step {step + 1}</text>"
        )
    wide, high = per_line * width, -(-len(cells) // per_line) * height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        f'viewBox="0 0 {wide} {high}" font-family="monospace" font-size="11">'
        f"{''.join(cells)}</svg>\n"
    )
