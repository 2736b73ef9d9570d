"""What each choice in training a block drafter is worth: short runs that differ in one thing.

    python benchmarks/dflash_ablations.py --verifier smollm2 --data runs/dflash/answers.jsonl \\
        --folder runs/ablations [--steps 300] [--only base layers]

The first answers of ``--data`` are copied into ``--folder`` at the first start, so that all runs
see the same ones; one prompt in 16 is held out.  A stopped run goes on with the first
variant that is not finished; the results of all are one JSON file.  Measured is what training
measures: tokens per forward of the verifier on its held-out answers, by a walk through them; the
interval is of the mean difference per answer from the first variant, over answers.  Counts do not
depend on the machine beyond rounding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dllm
from dllm.drafting.naming import load_verifier
from dllm.train.dflash.data import Answer, HiddenStates, read_answers
from dllm.train.dflash.evaluate import Acceptance, acceptance
from dllm.train.dflash.model import default_target_layer_ids
from dllm.train.dflash.objective import Objective
from dllm.train.dflash.recipe import DFlashTraining, Schedule, keep_taps, mask_id, start
from dllm.train.loop import machine_has_bf16, resume

from real import smollm2  # isort: skip
from report import RESULTS, write  # isort: skip

HELD_OUT = 16  # one prompt in so many
LEARNING_RATE, WARMUP = 1e-3, 30
Change = Callable[[DFlashTraining], DFlashTraining]


def with_objective(**what: Any) -> Change:
    return lambda recipe: replace(recipe, objective=replace(recipe.objective, **what))


def with_recipe(**what: Any) -> Change:
    return lambda recipe: replace(recipe, **what)


def with_taps(places: tuple[int, ...]) -> Change:
    """Of the base's taps those at ``places``."""
    return lambda recipe: replace(recipe, taps=tuple((recipe.taps or ())[i] for i in places))


def with_seed(recipe: DFlashTraining) -> DFlashTraining:
    return replace(recipe, schedule=replace(recipe.schedule, seed=1))


def convolved(recipe: DFlashTraining) -> DFlashTraining:
    return with_objective(markov=0)(replace(recipe, conv=True))


def both(recipe: DFlashTraining) -> DFlashTraining:
    return with_objective(markov=0, selector=256)(replace(recipe, conv=True))


# name -> what is asked, the change, and the share of the answers that is trained on
VARIANTS: dict[str, tuple[str, Change, float]] = {
    "base": ("", lambda recipe: recipe, 1.0),
    "another seed": ("noise", with_seed, 1.0),
    "no head": ("head", with_objective(markov=0), 1.0),
    "selector": ("head", with_objective(markov=0, selector=256), 1.0),
    "convolution": ("DFlash 2", convolved, 1.0),
    "convolution, selector": ("DFlash 2", both, 1.0),
    "init random": ("start", with_recipe(init="random"), 1.0),
    "block 4": ("block", with_recipe(block_size=4), 1.0),
    "block 8": ("block", with_recipe(block_size=8), 1.0),
    "2 layers": ("layers", with_recipe(layers=2), 1.0),
    "2 taps": ("taps", with_taps((0, 3)), 1.0),
    "1 tap": ("taps", with_taps((2,)), 1.0),
    "decay": ("loss", with_objective(loss="decay"), 1.0),
    "soft 0": ("loss", with_objective(soft=0.0), 1.0),
    "head rows 2048": ("head rows", with_objective(head_rows=2048), 1.0),
    "head rows 16384": ("head rows", with_objective(head_rows=16384), 1.0),
    "half the answers": ("answers", lambda recipe: recipe, 0.5),
    "a quarter of the answers": ("answers", lambda recipe: recipe, 0.25),
}


def base_recipe(layers: int, steps: int) -> DFlashTraining:
    """What every variant changes one thing of, for a verifier of ``layers``."""
    return DFlashTraining(
        layers=4, taps=tuple(default_target_layer_ids(layers, 4)), block_size=5, held_out=HELD_OUT,
        evaluated=96, objective=Objective(markov=256),
        schedule=Schedule(steps=steps, rows=8, anchors=48, learning_rate=LEARNING_RATE,
                          warmup=WARMUP, evaluate_every=steps + 1),  # measured here, at the end
    )  # fmt: skip


def copied(data: Path, folder: Path, count: int) -> dict[float, list[Path]]:
    """Files of answers by the share of them that is trained on; the held-out ones are in all."""
    folder.mkdir(parents=True, exist_ok=True)
    held, train = folder / "held.jsonl", folder / "train.jsonl"
    if not train.exists():
        lines = data.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")][:count]
        (folder / "answers.jsonl").write_text("".join(whole), encoding="utf-8")
        answers = list(read_answers(folder / "answers.jsonl"))
        kinds: dict[bool, list[str]] = {True: [], False: []}
        for line, answer in zip(whole, answers, strict=True):
            kinds[answer.held_out(HELD_OUT)].append(line)
        held.write_text("".join(kinds[True]), encoding="utf-8")
        train.write_text("".join(kinds[False]), encoding="utf-8")
    return {share: [held, part_of(train, share)] for _, _, share in VARIANTS.values()}


def part_of(file: Path, share: float) -> Path:
    """The first answers of ``file``.  What was computed for it counts for them, too."""
    if share == 1:
        return file
    part = file.with_name(f"{file.stem}-{share:g}.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    part.write_text("".join(lines[: round(share * len(lines))]), encoding="utf-8")
    for suffix in (".taps", ".taps.json"):
        link = part.with_suffix(suffix)
        link.unlink(missing_ok=True)
        link.symlink_to(file.with_suffix(suffix).name)
    return part


def measured(run: Any, held: list[Answer], taps: HiddenStates, walking: bool) -> Acceptance:
    trainee = run.accelerator.unwrap_model(run.model)
    with run.accelerator.autocast():
        return acceptance(trainee, held, taps, 4, walking)


def train_one(
    verifier: Any, recipe: DFlashTraining, files: list[Path], folder: Path
) -> dict[str, Any]:
    """One variant from start to figures."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped in the middle
    run, split = start(verifier, files, recipe, folder, bf16=machine_has_bf16(verifier.device.type))
    began = time.process_time()
    resume(run)
    seconds = time.process_time() - began
    taps = HiddenStates(recipe.taps or (), verifier.hf.config.get_text_config().hidden_size)
    walked = measured(run, split.held, taps, walking=True)
    alone = walked if run.model.walk is None else measured(run, split.held, taps, walking=False)
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "tokens_per_forward": walked.per_forward, "without_head": alone.per_forward,
        "reached": [round(share, 4) for share in walked.reached],
        "per_answer": [round(value, 3) for value in walked.per_answer],
        "answers": len(split.train), "answer_tokens": sum(a.tokens for a in split.train),
        "held_out": len(split.held),
        "parameters": sum(p.numel() for p in run.model.blocks.drafter.parameters()),
        "processor_seconds": round(seconds, 1),
    }  # fmt: skip


def difference(one: list[float], other: list[float]) -> list[float]:
    """Mean of the paired differences of ``one`` over ``other``, and its 95 % interval."""
    gaps = np.asarray(one) - np.asarray(other)
    error = 1.96 * gaps.std(ddof=1) / len(gaps) ** 0.5
    return [float(gaps.mean()), float(gaps.mean() - error), float(gaps.mean() + error)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--verifier", default="smollm2")
    parser.add_argument("--data", type=Path, required=True, help='lines of {"ids", "answer"}')
    parser.add_argument("--folder", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--answers", type=int, default=1600, help="of the data, the first ones")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=[])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "dflash_ablations.json")
    options = parser.parse_args()
    names = options.only or list(VARIANTS)
    if len(names) == 1:
        return run_variant(names[0], options)
    for name in names:  # each in a process of its own, so that memory is given back
        again = [arg for arg in sys.argv[1:] if arg not in ("--only", *VARIANTS)]
        subprocess.run([sys.executable, __file__, *again, "--only", name], check=True)


def run_variant(name: str, options: Any) -> None:
    """One variant, unless it is among the results already."""
    settings = {"steps": options.steps, "threads": options.threads,
                "learning_rate": LEARNING_RATE, "rows": 8, "anchors": 48}  # fmt: skip
    result = finished(options.output, settings)
    if name in result:
        return
    torch.set_num_threads(options.threads)
    model = smollm2() if options.verifier == "smollm2" else dllm.load(options.verifier)
    if machine_has_bf16("cpu"):
        model.hf.to(torch.bfloat16)
    verifier = load_verifier(dllm.load(model.hf, tokenizer=model.tokenizer))
    base = base_recipe(verifier.hf.config.get_text_config().num_hidden_layers, options.steps)
    files = copied(options.data, options.folder, options.answers)
    config = base.config(verifier.hf.config, mask_id(verifier))
    for done in itertools.islice(keep_taps(files[1.0], verifier.hf, config), 0, None, 16):
        print(f"hidden states of {done} answers", flush=True)
    question, change, share = VARIANTS[name]
    got = train_one(verifier, change(base), files[share], options.folder / "run")
    result[name] = {"question": question, **got}
    base_of = next(iter(result.values()))
    result[name]["difference"] = difference(got["per_answer"], base_of["per_answer"])
    print(f"{name}: {got['tokens_per_forward']:.3f} tokens per forward, "
          f"{got['processor_seconds']:.0f} s", flush=True)  # fmt: skip
    write(options.output, {"settings": settings, "variants": result})


def finished(output: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Variants of an earlier start with the same settings."""
    if not output.exists():
        return {}
    known: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    if known["settings"] != settings:
        raise SystemExit(f"{output} holds runs of other settings: move it away, or use --output")
    variants: dict[str, Any] = known["variants"]
    return variants


if __name__ == "__main__":
    main()
