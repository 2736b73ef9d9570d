"""Runs on a diffusion model's own trajectories: `parallel` and `repair`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...api import generate
from ...models import DiffusionModel
from ..loop import Loop, Metrics, Schedule, loop, machine_has_bf16, same_recipe
from ..network import Network
from ..objectives import parallel, repair
from ..trajectories import Batches, Question, read_trajectories

Settings = parallel.Settings | repair.Settings


@dataclass(frozen=True)
class Recipe:
    """``objective``: settings of `parallel` or `repair`; ``rows`` answers per step; ``rank`` of the
    adapter, 0 trains all weights; ``sampler``: what the run is measured with."""

    objective: Settings
    schedule: Schedule = field(default_factory=lambda: Schedule(1000, 2e-5, 20, "constant"))
    rows: int = 8
    rank: int = 0
    sampler: str = "threshold(0.9)"


def start(
    model: DiffusionModel, files: Sequence[Path], recipe: Recipe, folder: Path, *,
    held_out: Sequence[Question] = (), say: Callable[[str], None] | None = None,
    gradient_checkpointing: bool = False,
) -> Loop:  # fmt: skip
    """A run, ready: a checkpoint in ``folder`` is taken up by `resume`."""
    same_recipe(folder, recipe)
    network = Network(model, recipe.rank)
    if gradient_checkpointing:
        network.hf.gradient_checkpointing_enable()
    answers = [answer for file in files for answer in read_trajectories(file)]
    hints, objective = None, recipe.objective
    module: Any
    if isinstance(objective, parallel.Settings):
        module = parallel.Parallel(network, objective)
        if objective.kl and objective.reference:
            hints = reference_turn(model)
    else:
        module = repair.Repair(network, objective)
    schedule = recipe.schedule
    batches = Batches(answers, recipe.rows, schedule.steps * schedule.accumulate, schedule.seed,
                      hints)  # fmt: skip
    device = model.device.type

    def measure(objective: Any) -> Metrics:
        return parallelism(objective.network.snapshot(), held_out, recipe.sampler)

    return loop(
        module, batches, schedule, folder / "checkpoints", measure=measure if held_out else None,
        bf16=bool(recipe.rank) and machine_has_bf16(device), device=device, say=say,
    )  # fmt: skip


def reference_turn(model: DiffusionModel) -> tuple[list[int], list[int]]:
    """Ids before and behind an answer that is shown to the teacher: a system message where the
    chat template has one."""
    tokenizer: Any = model.tokenizer
    here = "\u2063here\u2063"
    text = f"Reference Answer: {here}\n"
    if tokenizer.chat_template is not None:
        turns = [{"role": "system", "content": f"Reference Answer: {here}"},
                 {"role": "user", "content": "?"}]  # fmt: skip
        whole = tokenizer.apply_chat_template(turns, tokenize=False)
        user = tokenizer.apply_chat_template(turns[1:], tokenize=False)
        if whole.endswith(user) and whole.count(here) == 1:
            text = whole.removesuffix(user)
    before, after = (tokenizer(part, add_special_tokens=False).input_ids
                     for part in text.split(here))  # fmt: skip
    return before, after


def parallelism(model: DiffusionModel, questions: Sequence[Question], sampler: str) -> Metrics:
    """Tokens per forward and, where it is known, the share of right answers."""
    results = generate(model, [q.prompt for q in questions], sampler=sampler)
    known = [q.right(r.text) for q, r in zip(questions, results, strict=True)]
    judged = [right for right in known if right is not None]
    forwards = sum(result.nfe for result in results)
    metrics = {"tokens_per_forward": sum(r.decided for r in results) / max(1, forwards),
               "forwards": forwards / len(results)}  # fmt: skip
    return metrics | ({"accuracy": sum(judged) / len(judged)} if judged else {})


def finish(run: Loop, model: DiffusionModel, recipe: Recipe, folder: Path) -> None:
    """Write what was trained: the adapter, or the whole model, with what made it."""
    objective: Any = run.accelerator.unwrap_model(run.model)
    network: Network = objective.network
    network.hf.train(False)
    if recipe.rank:
        network.hf.save_pretrained(folder)  # of a network with an adapter, the adapter
    else:
        network.snapshot().save_pretrained(folder)
    settings = {"objective": type(objective).__name__.lower(), "base": model.name}
    settings |= asdict(recipe) | {"torch": str(__import__("torch").__version__)}
    (folder / "recipe.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
