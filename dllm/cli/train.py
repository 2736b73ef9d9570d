"""``dllm train``: drafters, distillation and conversion."""

from dataclasses import dataclass
from pathlib import Path

import typer

from . import dflash, distill
from .dflash import DATA, OUTPUT, TRAINING, Reported, resumable, setting
from .inputs import read_lines
from .options import everywhere, takes
from .output import note

train_app = typer.Typer(
    help="Train drafters, and adapt diffusion models.",
    no_args_is_help=True,
    add_completion=False,
)


@dataclass(frozen=True, kw_only=True)
class Deer(Reported):
    """Options of ``dllm train deer``."""

    verifier: str = setting("nano-ar", "Verifier: hub id, folder or nano-ar.", DATA)
    drafter: str = setting("nano", "Drafter: hub id, folder or nano.", DATA)
    prompts: Path | None = setting(
        None, "File of prompts, one per line (default: generated tasks).", DATA
    )
    examples: int = setting(1000, "Prompts the verifier answers.", DATA, min=1)
    stage1_steps: int = setting(400, "Steps of stage 1.", TRAINING, min=1)
    stage2_steps: int = setting(200, "Steps of stage 2.", TRAINING, min=1)
    window: int = setting(16, "Masks of a drafting window.", TRAINING, min=1)
    seed: int = setting(0, "Random seed.", TRAINING, min=0)
    output: Path = setting(Path("runs/deer"), "Folder of the run.", OUTPUT)


@takes(Deer)
def deer(*, options: Deer) -> None:
    """Align a diffusion drafter with a verifier, in DEER's two stages."""
    from ..models import load
    from ..train.recipes.deer import Alignment, align, save_aligned, teacher_answers
    from ..train.trajectories import task_questions

    o = options
    recipe = Alignment(
        stage1_steps=o.stage1_steps, stage2_steps=o.stage2_steps, window=o.window, far=o.window,
        seed=o.seed,
    )  # fmt: skip
    own = [question.prompt for question in task_questions(o.examples, o.seed)]
    asked: list[str] = own if o.prompts is None else read_lines(o.prompts)
    report = o.report()
    note(f"{len(asked)} answers of {o.verifier}")
    pairs = teacher_answers(load(o.verifier), asked)
    with resumable():
        for number, model in enumerate(align(load(o.drafter), pairs, recipe, o.output, report), 1):
            save_aligned(model, recipe, o.output / f"stage{number}")
    note(f"aligned drafter: {o.output / 'stage2'}")


for command, shown in (
    (deer, ()), (dflash.dflash, dflash.SHOWN),
    (distill.parallel, distill.SHOWN), (distill.convert, distill.SHOWN),
):  # fmt: skip
    train_app.command()(everywhere(command, shown))
