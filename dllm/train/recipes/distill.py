"""Runs on a diffusion model's own answers: `parallel` and `blocks`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...api import generate
from ...models import DiffusionModel
from ...models.quiet import quiet
from .. import loop as training
from ..dflash.generate import HERE, around
from ..network import Network, check_trainable
from ..objectives import blocks, parallel
from ..processes import by_the_first, is_first
from ..trajectories import Batches, Question, read_trajectories, write_answers, write_trajectories

Asked = Sequence[Question]

ObjectiveSettings = parallel.ParallelSettings | blocks.BlockSettings
OBJECTIVES: dict[type, Any] = {
    parallel.ParallelSettings: parallel.Parallel, blocks.BlockSettings: blocks.Blocks,
}  # fmt: skip
KEPT = 3  # rounds whose answers are learnt


@dataclass(frozen=True)
class Distillation:
    """``objective``: settings of `parallel` or `blocks`; ``rows`` answers per step;
    ``rank`` of the adapter, 0 trains all weights; ``sampler``: what decodes the answers, and what
    the run is measured with; ``samples`` of each prompt at ``temperature``, of which the fastest
    right one is learnt; ``rounds``: how often what was trained decodes again and is trained on."""

    objective: ObjectiveSettings
    schedule: training.Schedule = field(
        default_factory=lambda: training.Schedule(1000, 2e-5, 20, "constant")
    )
    rows: int = 8
    rank: int = 0
    sampler: str = "threshold(0.9)"
    samples: int = 1
    temperature: float = 0.0
    rounds: int = 1


def train(
    model: DiffusionModel, recipe: Distillation, folder: Path, questions: Callable[[int], Asked], *,
    data: Sequence[Path] = (), held_out: Asked = (), report: training.Report = training.SILENT,
    teacher: DiffusionModel | None = None, gradient_checkpointing: bool = False,
) -> training.Loop | None:  # fmt: skip
    """All rounds in ``folder``, where a stopped run goes on; returns the last one's loop, None for
    a schedule without steps, which only writes the answers.

    ``questions`` of a round, from 0, are decoded with what the one before has made, and learnt with
    those of the two before it; the first round learns from the files of ``data`` instead where
    there are any, or from what an autoregressive ``teacher`` answers.
    """
    if recipe.schedule.steps:
        check_trainable(model, recipe.rank)
    begun = any(folder.rglob(f"checkpoint-*/{training.STATE}"))
    free = () if begun else ("objective", "schedule", "rows", "rank")  # no answer depends on them
    training.same_recipe(folder, recipe, model.name, **dict.fromkeys(free))

    def write(asked: Asked, file: Path, first: bool) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if teacher is not None and first:
            writing = write_answers(teacher, asked, file, model.facts.block_length or 1)
        else:
            writing = write_trajectories(
                model, asked, file, recipe.sampler, only_right=teacher is None,
                samples=recipe.samples, temperature=recipe.temperature,
            )  # fmt: skip
        for done in by_the_first(writing, model.device.type):
            if report.say is not None:
                report.say(f"{done}/{len(asked)} prompts decoded with {recipe.sampler}")

    files, run = [*data], None
    held = folder / "held-out.jsonl" if held_out and recipe.schedule.steps else None
    if held is not None:
        write(held_out, held, True)
    for number in range(recipe.rounds):
        part = folder if recipe.rounds == 1 else folder / f"round{number + 1}"
        if number or not data:
            file = part / "trajectories.jsonl"
            write(questions(number), file, number == 0)
            files = [*files, file][-KEPT:]
        if not recipe.schedule.steps:
            continue
        torch.manual_seed(recipe.schedule.seed)  # an adapter begins with random weights
        network = Network(model, recipe.rank, teacher)
        if gradient_checkpointing:
            network.recompute()
        run = start(network, files, recipe, part / "checkpoints", held_out, report, held)
        training.resume(run)
        network.hf.train(False)
        model = network.snapshot()
    return run


def start(
    network: Network, files: Sequence[Path], recipe: Distillation, folder: Path,
    held_out: Asked = (), report: training.Report = training.SILENT, held: Path | None = None,
) -> training.Loop:  # fmt: skip
    """One round, ready: a checkpoint in ``folder`` is taken up by `resume`.  ``held_out`` questions
    measure it, as does the loss of the answers in the file ``held``."""
    facts, block = network.facts, network.facts.block_length or 1
    room = facts.context_length + -facts.context_length % block
    read = partial(read_trajectories, vocabulary=facts.vocab_size, context=room)
    answers = [answer for file in files for answer in read(file)]
    objective, schedule = recipe.objective, recipe.schedule
    shown = (
        isinstance(objective, parallel.ParallelSettings) and objective.kl and objective.reference
    )
    hints = reference_turn(network.model) if shown else None
    steps = schedule.steps * schedule.accumulate
    batches = Batches(answers, recipe.rows, steps, schedule.seed, hints, block)
    training.same_answers(folder, answers)
    known = [] if held is None or not held.stat().st_size else read(held)
    rows = min(recipe.rows, len(known))
    tested = rows and Batches(known, rows, len(known) // rows, schedule.seed, hints, block)
    device = str(network.model.device)
    return training.loop(
        OBJECTIVES[type(objective)](network, objective), batches, schedule, folder,
        measure=partial(parallelism, held_out, recipe.sampler) if held_out else None,
        bf16=training.machine_has_bf16(device), device=device, report=report, held=tested or (),
    )  # fmt: skip


def reference_turn(model: DiffusionModel) -> tuple[list[int], list[int]]:
    """Ids before and behind an answer that is shown to the teacher: a system message where the
    chat template has one."""
    tokenizer: Any = model.tokenizer
    text = f"Reference Answer: {HERE}\n"
    if tokenizer.chat_template is not None:
        turns = [{"role": "system", "content": f"Reference Answer: {HERE}"},
                 {"role": "user", "content": "?"}]  # fmt: skip
        whole = tokenizer.apply_chat_template(turns, tokenize=False)
        user = tokenizer.apply_chat_template(turns[1:], tokenize=False)
        if whole.endswith(user) and whole.count(HERE) == 1:
            text = whole.removesuffix(user)
    return around(tokenizer, text)


def parallelism(questions: Asked, sampler: str, objective: Any) -> training.Metrics:
    """Tokens per forward of what is trained and, where it is known, the share of right answers."""
    results = generate(objective.network.snapshot(), [q.prompt for q in questions], sampler=sampler)
    known = [q.right(r.text) for q, r in zip(questions, results, strict=True)]
    judged = [right for right in known if right is not None]
    forwards = sum(result.nfe for result in results)
    metrics = {"tokens_per_forward": sum(r.decided for r in results) / max(1, forwards),
               "forwards": forwards / len(results)}  # fmt: skip
    return metrics | ({"accuracy": sum(judged) / len(judged)} if judged else {})


def finish(run: training.Loop, model: DiffusionModel, recipe: Distillation, folder: Path) -> None:
    """Write the adapter, or the whole model, and what made it; of several processes the first."""
    if not is_first():
        return
    network: Network = run.accelerator.unwrap_model(run.model).network
    if recipe.rank:
        with quiet():
            network.hf.save_pretrained(folder)  # of a network with an adapter, the adapter
    else:
        network.snapshot().save_pretrained(folder)
    settings = {"base": model.name} | asdict(recipe) | {"torch": str(torch.__version__)}
    (folder / "recipe.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
