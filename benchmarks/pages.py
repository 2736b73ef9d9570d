"""Write docs/samplers/, a page per method with what it costs and a picture of its commit order.

    python benchmarks/pages.py

The rule comes from the docstring, the figures from `results/samplers.json`, the picture from the
bundled model on one prompt that is the same for all.
"""

from __future__ import annotations

import html
import inspect
import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import dllm
from dllm.core.capabilities import LEFT_TO_RIGHT
from dllm.samplers import SAMPLERS

from harness import RESULTS  # isort: skip

FOLDER = Path(__file__).parents[1] / "docs" / "samplers"
PROMPT = "Tom has 23 apples. Tom buys 12 more. Then Tom loses 7. How many apples does Tom have?"
BLOCK = 8
BLOCKS = ("`nano-ar` after `dllm train convert --form block --rounds 1 --steps 120 "
          "--learning-rate 1e-3 --rows 32`, with cache `block` in windows of 32")  # fmt: skip

# name -> (a complete sampler, when to use it)
PAGES = {
    "llada": ("llada", "The reference: most accurate where order matters, one forward per token. "
              "With `steps` below the length it shows what blind parallelism costs."),
    "dream": ("dream", "The reference for Dream checkpoints, with their published schedule."),
    "threshold": ("threshold", "The default. Fast wherever the model is sure, careful where not."),
    "factor": ("factor", "Like `threshold`, but asks for more certainty the more is committed at "
               "once; no probability to tune."),
    "eb": ("eb", "When a bound on the joint error of a step is wanted instead of one per token."),
    "dparallel": ("dparallel", "With distilled dParallel checkpoints; otherwise `threshold`."),
    "d3llm": ("d3llm", "With d3LLM's distilled checkpoints only; cache `delayed`."),
    "d2f": ("d2f", "With D2F's checkpoints only, alone or as `lopa(d2f)`; cache `d2f`."),
    "localleap": ("localleap", "Fewer forwards than `threshold` at nearly its accuracy, in text "
                  "whose tokens depend on their neighbours."),
    "hierarchical": ("hierarchical", "Large blocks: it spreads commits over the gaps."),
    "klass": ("klass", "When confidence comes early and wrong; needs memory for distributions."),
    "r2": ("r2", "Repetitive or boilerplate text; best with the R2 checkpoints."),
    "credit": ("threshold+credit", "Answers that the model keeps preferring by a small margin."),
    "adablock": ("adablock", "Structured text, with lines or steps: blocks end where units end."),
    "dcd": ("dcd", "When errors gather at block borders: uncertain positions may wait."),
    "dsb": ("dsb", "Like `dcd` with less state; the window follows the number of commits."),
    "prophet": ("prophet", "Answers whose end is what counts, e.g. `prophet(start=...)` with "
                "`constraints`; stops refining once the answer is clear."),
    "ete": ("ete", "Where `threshold` keeps falling back to one token per step. Experimental: "
            "reconstructed. Costs k rows whenever it explores."),
    "lopa": ("lopa", "When a forward of several rows costs little more than one (GPU, batch 1)."),
    "freedave": ("freedave", "When the text must be exactly that of one token per step. Needs a "
                 "device where several rows cost little more than one."),
    "wino": ("wino", "When early mistakes should be taken back. Feeds the block twice, no cache."),
    "edit": ("edit", "With LLaDA2.1 and other checkpoints trained to edit; its remasking modes "
             "(`edit(mode=low_prob)`) need no training. Low thresholds first, repair after."),
    "s2d2": ("s2d2", "With block-diffusion models (SDAR, LLaDA2, Fast-dLLM v2's kind) and cache "
             "`block`: a forward that verifies costs about two blocks."),
    "remdm": ("remdm", "More forwards for better text: the least sure tokens of a block are "
              "written again and again before it closes."),
    "learn2pd": ("learn2pd", "With a filter trained on your model (`dllm train filter`)."),
    "dawn": ("dawn", "When tokens of one phrase should not be decided blindly side by side; reads "
             "the attention of the last layers, so without a cache."),
    "wedlm": ("wedlm", "Streams from left to right and looks a little ahead."),
    "certainty_prior": ("certainty_prior", "A gentle left-to-right order without blocks."),
}  # fmt: skip


def costs(spec: str) -> str:
    """What ``spec`` costs: on nano, and on a model of blocks where it was measured there."""
    pages = []
    for file, model in (("samplers", "`nano`"), ("samplers_blocks", BLOCKS)):
        path = RESULTS / f"{file}.json"
        result = json.loads(path.read_text()) if path.exists() else {"samplers": {}}
        if result["samplers"].get(spec, {}).get("tasks"):
            pages.append(rows_of(result, spec, model))
    return "\n".join(pages) or "Not measured beside the others yet.\n"


def rows_of(result: dict[str, Any], spec: str, model: str) -> str:
    base = result["samplers"][result["baseline"]]["tasks"]
    tasks = result["samplers"][spec]["tasks"]
    lines = ["| task | right | forwards | against `threshold` | tokens per forward |",
             "| --- | --- | --- | --- | --- |"]  # fmt: skip
    for task, row in tasks.items():
        ratio = row["nfe"] / base[task]["nfe"]
        lines.append(
            f"| `{task}` | {100 * row['accuracy']:.1f} % | {row['nfe']:.1f} | {ratio:.2f}× | "
            f"{row['tokens_per_forward']:.2f} |"
        )
    host = result["samplers"][spec].get("host_microseconds")
    if host:
        cost = f"One decision takes {host['32']:.0f} µs for 32 positions and {host['256']:.0f} µs "
        lines += ["", cost + "for 256 on the host."]
    n, of_base = (next(iter(t.values()))["examples"] for t in (tasks, base))
    lines += [] if n == of_base else ["", f"`{result['baseline']}` was measured on {of_base}."]
    return f"On {model}, {n} held-out prompts per task:\n\n" + "\n".join(lines) + "\n"


def compared(result: dict[str, Any], spec: str, tasks: Iterable[str]) -> str:
    """``spec`` against the baseline on ``tasks``: points of accuracy and forwards."""
    base = result["samplers"][result["baseline"]]["tasks"]
    own = result["samplers"][spec]["tasks"]
    here = [task for task in tasks if task in own]
    points = 100 * fmean(own[t]["accuracy"] - base[t]["accuracy"] for t in here)
    return f"{points:+.1f} points, {fmean(own[t]['nfe'] / base[t]['nfe'] for t in here):.2f}×"


def share_of_steps(result: dict[str, Any], spec: str, tasks: Iterable[str]) -> str:
    """The forwards of ``spec`` as a share of those of one token per step, mean over ``tasks``."""
    base, own = (result["samplers"][name]["tasks"] for name in ("llada", spec))
    share = fmean(own[t]["nfe"] / base[t]["nfe"] for t in tasks if t in own and t in base)
    return f"{100 * share:.1f} %"


def against_papers(result: dict[str, Any]) -> list[str]:
    """What the papers lead one to expect of the methods, and what `nano` shows."""
    base = result["samplers"][result["baseline"]]["tasks"]
    hard = [t for t in base if base[t]["nfe"] > 2]
    easy = [t for t in base if t not in hard]
    stories = [t for t in ("story1", "story2") if t in base]
    rows = [
        ("localleap", "14.2 % of the steps of one token per step (abstract)", hard,
         f"Of one token per step it needs {share_of_steps(result, 'localleap', hard)}. It saves "
         "where several forwards are needed, but not at equal accuracy: where several answers are "
         "right, neighbours decided together may belong to different ones. The 0.77× of "
         "`threshold` at equal accuracy that is often quoted is a third party's measurement."),
        ("adablock", "more accurate at the same threshold", stories,
         "The delimiters of `nano` are commas and colons, so blocks are a few tokens long and cost "
         "forwards; it helps where later lines build on earlier ones, and only there."),
        ("dcd", "more accurate at equal forwards", hard,
         "Blocks of 32 hold most answers whole, so there are no borders for errors to gather at; "
         "its window begins with 16 masks, which costs forwards. With `dcd(s_init=32)+eos` story2 "
         "and remove_random came out like `threshold`."),
        ("threshold+prophet", "fewer forwards where an answer ends the text", stories,
         "`nano` is sure early, so the gap passes the published bars at once. They were set for 8B "
         "models; raise `early`, `mid` and `late` on a model like this."),
        ("freedave(threshold(tau=0.95))", "the text of its base, exactly", hard,
         "Exact, tested on 500 prompts; the column compares it with `threshold` at 0.9."),
    ]  # fmt: skip
    lines = [
        "", "## Against the papers", "",
        f"Against `{result['baseline']}`, on tasks where it needs more than two forwards "
        f"({', '.join(hard)}) or on stories; the others ({', '.join(easy)}) leave little to save.",
        "", "| method | published | on `nano` | why |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for spec, claim, tasks, why in rows:
        lines.append(f"| `{spec}` | {claim} | {compared(result, spec, tasks)} | {why} |")
    return [
        *lines, "",
        "[Fidelity](../fidelity.md) says of each method which recorded runs of official code it "
        "reproduces step by step, and what deviates.",
    ]  # fmt: skip


def picture(result: Any, pieces: list[str]) -> str:
    """Commit order as SVG: a cell per token, darker is later, with the step's number.  Cells bring
    their own background, so that they are legible on light and dark pages; six of them fit a
    phone."""
    per_line, width, height = 6, 62, 34
    last = max(max(result.order), 1)
    cells = []
    for i, (step, piece) in enumerate(zip(result.order, pieces, strict=True)):
        x, y = i % per_line * width, i // per_line * height
        light = 93 - 35 * step / last
        cells.append(
            f'<rect x="{x}" y="{y}" width="{width - 2}" height="{height - 2}" rx="3" '
            f'fill="hsl(212 60% {light:.0f}%)"/>'
            f'<text x="{x + width / 2 - 1}" y="{y + 14}" text-anchor="middle">'
            f"{html.escape(piece.strip() or '␣')}</text>"
            f'<text x="{x + width / 2 - 1}" y="{y + 27}" text-anchor="middle" font-size="9">'
            f"step {step + 1}</text>"
        )
    wide, high = per_line * width, -(-len(pieces) // per_line) * height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        f'viewBox="0 0 {wide} {high}" font-family="monospace" font-size="11">'
        + "".join(cells)
        + "</svg>\n"
    )


def example(model: dllm.DiffusionModel, spec: str) -> tuple[dllm.Result, str]:
    """The example in blocks of `BLOCK` positions, so that several steps are seen, or as the sampler
    has it where it knows no blocks; and the options of the command that writes the same."""
    try:
        result = dllm.generate(model, PROMPT, sampler=spec, block_length=BLOCK)
        return result, f' -s "{spec}" --block-length {BLOCK}'
    except dllm.ConfigError:
        return dllm.generate(model, PROMPT, sampler=spec), f' -s "{spec}"'


def main() -> None:
    torch.set_num_threads(1)
    model = dllm.load("nano")
    assert model.tokenizer is not None
    file = RESULTS / "samplers.json"
    outcome = json.loads(file.read_text()) if file.exists() else {"samplers": {}, "baseline": ""}
    FOLDER.mkdir(parents=True, exist_ok=True)
    index = ["# Samplers", "", "| name | what it does | forwards on the example |",
             "| --- | --- | --- |"]  # fmt: skip
    for name, (spec, advice) in PAGES.items():
        cls = SAMPLERS[name]
        order, forwards = "None: the bundled model, which is bidirectional, is refused.\n", "-"
        if LEFT_TO_RIGHT not in cls().needs:
            result, options = example(model, spec)
            decode = partial(model.tokenizer.decode, skip_special_tokens=True)
            pieces = [decode([token]) or "∎" for token in result.tokens]
            (FOLDER / f"{name}.svg").write_text(picture(result, pieces), encoding="utf-8")
            order = (
                f'`dllm generate "{PROMPT}"{options}`: {result.nfe} forwards, {result.computed} '
                f"positions computed.\n\n![commit order]({name}.svg)\n\n```\n{result.text}\n```\n"
            )
            forwards = str(result.nfe)
        text = re.sub(r"``([^`]*)``", r"`\1`", inspect.cleandoc(cls.__doc__ or ""))
        summary, _, body = text.partition("\n\n")
        paper = f"*{cls.paper}*, arXiv [{cls.arxiv}](https://arxiv.org/abs/{cls.arxiv})"
        needs = ", ".join(sorted(map(str, cls().needs))) or "nothing"
        page = (
            f"# {name}\n\n{summary}\n\n{paper}\n\n{body}\n\n**When.** {advice}\n\n"
            f"**Needs** {needs}.\n\n## What it costs\n\n{costs(spec)}\n## Its order\n\n{order}"
        )
        (FOLDER / f"{name}.md").write_text(page, encoding="utf-8")
        index.append(f"| [{name}]({name}.md) | {summary.splitlines()[0]} | {forwards} |")
        print(f"{name:20} {forwards:>3} forwards", flush=True)
    index += against_papers(outcome)
    index += ["", f"The example: {PROMPT}", "", "Made by `python benchmarks/pages.py`."]
    (FOLDER / "index.md").write_text("\n".join(index) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
