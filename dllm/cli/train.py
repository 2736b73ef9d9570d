"""``dllm train``: drafters, distillation, conversion, and the recipes of the bundled models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import dflash, distill
from .inputs import read_lines
from .options import everywhere
from .output import check_output, note

train_app = typer.Typer(
    help="Train drafters, and adapt diffusion models.",
    no_args_is_help=True,
    add_completion=False,
)

NAMES = {"masked": "nano", "causal": "nano-ar", "uniform": "nano-uniform"}


@train_app.command()
@everywhere
def nano(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the run.", show_default="runs/nano"),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(help="'masked' (nano), 'causal' (nano-ar) or 'uniform' (nano-uniform)."),
    ] = "masked",
    steps: Annotated[
        int | None, typer.Option(help="Training steps.", min=1, show_default="the recipe's")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, ...")] = "cpu",
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the network with torch.compile.")
    ] = True,
    examples: Annotated[
        int,
        typer.Option(help="Held-out prompts per task in an evaluation (0: no evaluation).", min=0),
    ] = 16,
    weights_from: Annotated[
        Path | None, typer.Option(help="Folder of a run whose weights this run starts with.")
    ] = None,
) -> None:
    """Train nano from scratch; a run that was stopped goes on where it saved last."""

    from ..train.loop import Report
    from ..train.recipes.nano import NanoTraining, export, train

    recipe = NanoTraining.of(objective, seed=seed, **({} if steps is None else {"steps": steps}))
    folder = output or Path("runs") / NAMES[objective]
    with dflash.resumable():
        train(
            recipe, folder, device=device, compile_model=compiled, weights_from=weights_from,
            report=Report(note, log_every=50), accuracy_examples=examples,
        )  # fmt: skip
    export(folder, folder / NAMES[objective])
    note(f"{recipe.steps} steps of the {objective} recipe: {folder / NAMES[objective]}")


@train_app.command("filter")
@everywhere
def learned_filter(
    output: Annotated[Path, typer.Option("--output", "-o", help="The .npz file to write.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Hub id, folder or name.")] = "nano",
    prompts: Annotated[
        Path | None,
        typer.Option(help="One prompt per line.", show_default="the bundled model's tasks"),
    ] = None,
    count: Annotated[int, typer.Option(help="Prompts per bundled task.", min=1)] = 40,
    block_length: Annotated[int, typer.Option(help="Positions the filter sees.", min=1)] = 32,
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 1_500,
    seed: Annotated[int, typer.Option(help="Random seed.", min=0)] = 0,
) -> None:
    """Train Learn2PD's filter for a model: `--sampler "learn2pd(filter='FILE')"` then uses it."""
    from .. import load
    from ..eval.tasks import TASKS
    from ..train.recipes.filter import save_filter, train_filter, trajectories

    if prompts is not None:
        lines = read_lines(prompts)
    else:
        lines = [e.prompt for task in TASKS.values() for e in task.examples(count, seed, "train")]
    check_output(output, "the filter ")
    note(f"decoding {len(lines)} prompts, one token per step")
    data = trajectories(load(model), lines, block_length)
    note(f"training on {len(data[0])} steps")
    weights, measured = train_filter(*data, steps=steps, seed=seed)
    save_filter(weights, output)
    note(", ".join(f"{name} {value:.4f}" for name, value in measured.items()) + f": {output}")


@train_app.command()
@everywhere
def deer(
    verifier: Annotated[str, typer.Option(help="Hub id, folder or nano-ar.")] = "nano-ar",
    drafter: Annotated[str, typer.Option(help="Hub id, folder or nano.")] = "nano",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text file, one prompt per line.", show_default="generated tasks"),
    ] = None,
    examples: Annotated[int, typer.Option(help="Prompts the verifier answers.", min=1)] = 1_000,
    stage1_steps: Annotated[int, typer.Option(help="Steps of stage 1.", min=1)] = 400,
    stage2_steps: Annotated[int, typer.Option(help="Steps of stage 2.", min=1)] = 200,
    window: Annotated[int, typer.Option(help="Masks of a drafting window.", min=1)] = 16,
    marker_position: Annotated[
        str, typer.Option(help="Where the end marker stands: after_masks or before_masks.")
    ] = "after_masks",
    seed: Annotated[int, typer.Option(help="Random seed.", min=0)] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the result.")] = Path(
        "runs/deer"
    ),
) -> None:
    """Align a diffusion drafter with a verifier, in DEER's two stages."""
    from ..models import load
    from ..train.recipes.deer import Alignment, align, save_aligned, teacher_answers
    from ..train.trajectories import task_questions

    recipe = Alignment(
        stage1_steps=stage1_steps, stage2_steps=stage2_steps, window=window, far=window,
        marker_position=marker_position, seed=seed,
    )  # fmt: skip
    own = [question.prompt for question in task_questions(examples, seed)]
    asked: list[str] = own if prompts is None else read_lines(prompts)
    note(f"{len(asked)} answers of {verifier}")
    pairs = teacher_answers(load(verifier), asked)
    with dflash.resumable():
        for number, model in enumerate(align(load(drafter), pairs, recipe, output, note), 1):
            save_aligned(model, recipe, output / f"stage{number}")
    note(f"aligned drafter: {output / 'stage2'}")


train_app.command()(everywhere(dflash.dflash, dflash.SHOWN))
for command in (distill.parallel, distill.convert):
    train_app.command()(everywhere(command, distill.SHOWN))
