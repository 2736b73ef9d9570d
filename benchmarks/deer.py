"""DEER's alignment for real: acceptance before, after stage 1 and after stage 2, depth by depth.

    python benchmarks/deer.py --start nano --output benchmarks/results/deer_nano.json
    python benchmarks/deer.py --start converted --output benchmarks/results/deer_converted.json

``--start nano``: the bundled diffusion model, which has seen the verifier's tasks.  ``--start
converted``: the verifier's own weights with attention in both directions, as the paper starts on
mathematics: it knows what the verifier knows, but has never filled in a mask since.
``--dflash-steps``: beside them a block drafter (DFlash), trained on the same answers from the
verifier's layers; its drafts are chains of a block.  Drafts are one
step, a whole window, argmax, without a search; the verifier is greedy.  Held-out prompts of every
task.  ``oracle`` is what a drafter that is never wrong would reach.
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import dllm
from dllm.drafting.base import RoundStats
from dllm.drafting.dflash.drafter import BlockDrafter
from dllm.drafting.result import conditional_acceptance
from dllm.eval.tasks import TASKS
from dllm.train.dflash.objective import Objective
from dllm.train.dflash.recipe import DFlashTraining, Schedule, finish, start
from dllm.train.loop import LOG, resume
from dllm.train.recipes.deer import Alignment, align, save_aligned, teacher_answers
from dllm.train.trajectories import task_questions

from report import RESULTS, write  # isort: skip


def starting(name: str, verifier: Any) -> Any:
    """The drafter before alignment."""
    if name != "converted":
        return dllm.load(name)
    mask = dllm.load("nano").facts.mask_token_id
    hf = copy.deepcopy(verifier.hf)
    return dllm.load(
        hf, family="llada", tokenizer=verifier.tokenizer, mask_token_id=mask, logit_shift=1
    )


class Judge:
    """The verifier's plain answers to held-out prompts, and what drafts of them are worth."""

    def __init__(self, verifier: Any, examples: int, window: int) -> None:
        self.verifier, self.window = verifier, window
        self.prompts = {n: [e.prompt for e in TASKS[n].examples(examples, 0)] for n in TASKS}
        self.plain = {n: self._speculate(None, prompts) for n, prompts in self.prompts.items()}

    def _speculate(self, drafter: Any, prompts: list[str]) -> Any:
        controller = f"fixed(k={self.window})"
        return dllm.speculate(
            self.verifier, drafter, prompts, max_new_tokens=64, controller=controller
        )

    def oracle(self) -> dict[str, float]:
        """Accepted tokens per round of a drafter that is never wrong."""
        result, k = {}, self.window
        for task, rows in self.plain.items():
            lengths = [len(r.tokens) for r in rows]
            rounds = sum(-(-n // (k + 1)) for n in lengths)
            accepted = sum((n // (k + 1)) * k + n % (k + 1) for n in lengths)
            result[task] = accepted / rounds
        return result

    def __call__(self, drafter: Any) -> dict[str, Any]:
        """Figures per task and over all, of a diffusion model or a drafter."""
        part = drafter
        if not isinstance(drafter, BlockDrafter):
            part = dllm.DiffusionDrafter(drafter, search="argmax", window=self.window)
        tasks, everything = {}, []
        for task, prompts in self.prompts.items():
            outcome, plain = self._speculate(part, prompts), self.plain[task]
            rounds = [r for result in outcome for r in result.rounds]
            everything += rounds
            tasks[task] = figures(rounds) | {
                "identical": float(np.mean([a.tokens == b.tokens
                                            for a, b in zip(outcome, plain, strict=True)])),
                "forwards_saved": sum(r.nfe for r in plain) / len(rounds),
            }  # fmt: skip
        return {"overall": figures(everything), "tasks": tasks}


def block_drafter(verifier: Any, pairs: Any, steps: int, block: int) -> BlockDrafter:
    """A DFlash drafter, trained on ``pairs`` of prompts and answers."""
    recipe = DFlashTraining(
        layers=2, block_size=block, held_out=16, objective=Objective(head_rows=256),
        schedule=Schedule(steps=steps, rows=8, anchors=16, evaluate_every=steps),
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        file = Path(folder) / "answers.jsonl"
        with file.open("w") as out:
            for prompt, answer in pairs:
                entry = {"ids": [*map(int, prompt), *map(int, answer)], "answer": len(prompt)}
                out.write(json.dumps(entry) + "\n")
        run, split = start(verifier, [file], recipe, Path(folder), bf16=False)
        resume(run)
        finish(run, verifier, recipe, split, Path(folder) / "drafter")
        return BlockDrafter(Path(folder) / "drafter")


def figures(rounds: list[RoundStats]) -> dict[str, Any]:
    return {
        "rounds": len(rounds),
        "accepted_per_round": sum(r.accepted for r in rounds) / len(rounds),
        "conditional_acceptance": np.nan_to_num(conditional_acceptance(rounds)).round(4).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verifier", default="nano-ar")
    parser.add_argument("--start", default="nano", help="'converted', or a diffusion model")
    parser.add_argument("--answers", type=int, default=4_000, help="of the verifier, to learn from")
    parser.add_argument("--examples", type=int, default=20, help="held-out prompts per task")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--rows", type=int, default=24, help="sequences per step")
    parser.add_argument("--stage1-steps", type=int, default=1_200)
    parser.add_argument("--stage2-steps", type=int, default=400)
    parser.add_argument("--stage1-lr", type=float, default=5e-4)
    parser.add_argument("--stage2-lr", type=float, default=2e-4)
    parser.add_argument("--dflash-steps", type=int, default=0, help="0: no block drafter")
    parser.add_argument("--dflash-block", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the aligned drafters")
    parser.add_argument("--output", type=Path, default=RESULTS / "deer.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    verifier = dllm.load(options.verifier)
    drafter = starting(options.start, verifier)
    recipe = Alignment(
        stage1_steps=options.stage1_steps, stage2_steps=options.stage2_steps,
        stage1_lr=options.stage1_lr, stage2_lr=options.stage2_lr,
        rows=options.rows, window=options.window, far=options.window,
    )  # fmt: skip
    judge = Judge(verifier, options.examples, options.window)
    stages: dict[str, Any] = {"before": judge(drafter)}
    print("before", stages["before"]["overall"]["accepted_per_round"], flush=True)
    losses: list[dict[str, Any]] = []

    def save() -> None:
        result = {
            "verifier": verifier.name, "start": options.start, "recipe": asdict(recipe),
            "dflash_steps": options.dflash_steps, "dflash_block": options.dflash_block,
            "answers": options.answers, "examples": options.examples, "oracle": judge.oracle(),
            "stages": stages, "losses": losses,
        }  # fmt: skip
        write(options.output, result)

    prompts = [question.prompt for question in task_questions(options.answers, 0)]
    pairs = teacher_answers(verifier, prompts)
    if options.dflash_steps:
        blocks = block_drafter(verifier, pairs, options.dflash_steps, options.dflash_block)
        stages["dflash"] = judge(blocks)
        print("dflash", stages["dflash"]["overall"]["accepted_per_round"], flush=True)
        save()
    with TemporaryDirectory() as folder:
        for number, model in enumerate(align(drafter, pairs, recipe, Path(folder), print), 1):
            log = Path(folder) / f"checkpoints{number}" / LOG
            for entry in map(json.loads, log.read_text().splitlines()):
                if "loss" in entry:
                    losses.append({"stage": number, **{k: entry[k] for k in ("step", "loss")}})
            name = f"stage{number}"
            stages[name] = judge(model)
            print(name, stages[name]["overall"]["accepted_per_round"], flush=True)
            if options.keep is not None:
                save_aligned(model, recipe, options.keep / name)
            save()


if __name__ == "__main__":
    main()
