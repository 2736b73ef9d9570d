"""``dllm train``: drafters, and what a model learns from its own answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..core.errors import ConfigError, PromptError, UnknownNameError
from . import dflash
from .dflash import DATA, OUTPUT, TRAINING, Reported, resumable, setting, unused
from .inputs import read_lines
from .options import everywhere, takes
from .output import note

if TYPE_CHECKING:
    from ..models import DiffusionModel
    from ..train.recipes.distill import ObjectiveSettings
    from ..train.trajectories import Question

train_app = typer.Typer(
    help="Train drafters, and adapt diffusion models.", no_args_is_help=True, add_completion=False
)
# Options of the help page; --help-all has all.
SHOWN = (
    "model prompts tasks answers steps rows rank "
    "learning_rate evaluate_every rounds recipe device seed output"
).split()


def _questions(model: DiffusionModel, file: Path) -> list[Question]:
    """The prompts of a file.  Raises `PromptError` for one that leaves no room for an answer."""
    from ..request.prompts import encode
    from ..train.trajectories import Question

    prompts, room = read_lines(file), model.facts.context_length
    for number, prompt in enumerate(prompts, 1):
        if (size := len(encode(model, prompt))) >= room:
            raise PromptError(
                f"prompt {number} of {file} has {size} tokens, the context of {model.name} {room}: "
                "shorten it, or leave it out"
            )
    return [*map(Question, prompts)]


@dataclass(frozen=True, kw_only=True)
class Deer(Reported):
    """Options of ``dllm train deer``."""

    verifier: str = setting("nano-ar", "Verifier: hub id, folder or nano-ar.", DATA)
    drafter: str = setting("nano", "Drafter: hub id, folder or nano.", DATA)
    prompts: Path | None = setting(
        None, "File of prompts, one per line (default: generated tasks).", DATA
    )
    examples: int | None = setting(
        None, "Generated prompts the verifier answers, default 1000.", DATA, min=1
    )
    stage1_steps: int = setting(400, "Steps of stage 1.", TRAINING, min=1)
    stage2_steps: int = setting(200, "Steps of stage 2.", TRAINING, min=1)
    window: int = setting(16, "Masks of a drafting window.", TRAINING, min=1)
    seed: int = setting(0, "Random seed.", TRAINING, min=0)
    output: Path = setting(Path("runs/deer"), "Folder of the run.", OUTPUT)


@takes(Deer)
def deer(*, options: Deer) -> None:
    """Align a diffusion drafter with a verifier, in DEER's two stages."""
    from ..drafting.naming import load_verifier
    from ..models import load
    from ..train.recipes.deer import Alignment, align, begin, save_aligned, teacher_answers
    from ..train.trajectories import task_questions

    o = options
    recipe = Alignment(
        stage1_steps=o.stage1_steps, stage2_steps=o.stage2_steps, window=o.window, far=o.window,
        seed=o.seed,
    )  # fmt: skip
    if o.prompts is not None:
        unused("--prompts", {"--examples": o.examples})
    report = o.report()
    verifier, drafter = load_verifier(o.verifier), load(o.drafter)
    if o.prompts is not None:
        asked = _questions(verifier, o.prompts)
    else:
        asked = task_questions(o.examples or 1000, o.seed)
    with resumable(o.output):
        begin(drafter, recipe, o.output, verifier.name)
        pairs = teacher_answers(verifier, asked, o.output / "answers.jsonl", say=note)
        stages = align(drafter, pairs, recipe, o.output, report, verifier.name)
        for number, model in enumerate(stages, 1):
            save_aligned(model, recipe, o.output / f"stage{number}")
    note(f"aligned drafter: {o.output / 'stage2'}")


@dataclass(frozen=True, kw_only=True)
class Run(Reported):
    """Options of ``dllm train parallel`` and ``convert``."""

    model: str = setting(..., "Model: hub id, folder or bundled name.", DATA)
    prompts: Path | None = setting(
        None, "File of prompts, one per line (default: generated tasks).", DATA
    )
    tasks: str | None = setting(None, "Generated tasks, e.g. story2,shuffle (default: all).", DATA)
    data: list[Path] | None = setting(None, "Files of answers from earlier runs; repeatable.", DATA)
    answers: int | None = setting(None, "Generated prompts to answer, default 2000.", DATA, min=1)
    held_out: int = setting(64, "Prompts held out for evaluation.", DATA, min=1)
    steps: int = setting(1000, "Training steps (0: only write answers).", TRAINING, min=0)
    rows: int = setting(8, "Answers per batch.", TRAINING, min=1)
    learning_rate: float = setting(2e-5, "Peak learning rate.", TRAINING, min=0.0)
    schedule: str = setting("cosine", "Learning-rate schedule of transformers.", TRAINING)
    warmup: int = setting(20, "Warm-up steps.", TRAINING, min=0)
    accumulate: int = setting(1, "Batches per step, of all processes.", TRAINING, min=1)
    evaluate_every: int = setting(100, "Evaluate every N steps.", TRAINING, min=1)
    checkpointing: bool = setting(
        False, "Recompute activations instead of keeping them.", TRAINING,
        "--checkpointing/--no-checkpointing",
    )  # fmt: skip
    device: str = setting("cpu", "Device: cpu, cuda, ...", TRAINING)
    seed: int = setting(0, "Random seed.", TRAINING, min=0)
    output: Path | None = setting(None, "Folder of the run.", OUTPUT)

    def asked(
        self, model: DiffusionModel
    ) -> tuple[Callable[[int], list[Question]], list[Question]]:
        """The questions of a round, and those that are held out."""
        from ..eval.tasks import TASKS
        from ..train.trajectories import task_questions

        tasks = tuple(TASKS) if self.tasks is None else tuple(self.tasks.split(","))
        for task in set(tasks) - set(TASKS):
            raise UnknownNameError("task", task, TASKS)
        if self.prompts is None:
            held = task_questions(self.held_out, self.seed, tasks, "test")
        else:
            unused("--prompts", {"--tasks": self.tasks, "--answers": self.answers})
            lines = _questions(model, self.prompts)
            own, held = lines[: -self.held_out], lines[-self.held_out :]
            if not own:
                raise ConfigError(
                    f"{self.prompts} has {len(lines)} prompts, and {self.held_out} are held out to "
                    "evaluate: give more, or hold out fewer with --held-out"
                )

        def questions(number: int) -> list[Question]:
            if self.prompts is not None:
                return own
            return task_questions(self.answers or 2000, self.seed + number, tasks)

        return questions, held


@dataclass(frozen=True, kw_only=True)
class Parallel(Run):
    """Options of ``dllm train parallel``."""

    recipe: str = setting("tad", "Recipe: tad, dparallel or d3llm.", TRAINING)
    rank: int = setting(32, "Rank of the LoRA adapter (0: train all weights).", TRAINING, min=0)
    dtype: str = setting("auto", "Data type of the frozen weights.", TRAINING)
    sampler: str = setting(
        "threshold(0.9)", "Sampler that decodes the trajectories and the evaluation.", DATA
    )
    rounds: int = setting(
        1, "Rounds of decoding and training, each with the model of the last.", TRAINING, min=1
    )
    samples: int = setting(
        1, "Answers per prompt; the correct one with the fewest forwards is learnt.", DATA, min=1
    )
    temperature: float = setting(0.0, "Sampling temperature of the answers.", DATA, min=0.0)


@takes(Parallel)
def parallel(*, options: Parallel) -> None:
    """Teach a diffusion model to decide more tokens per forward (TAD, dParallel, d3LLM)."""
    from ..train.objectives.parallel import PRESETS

    o = options
    if o.recipe not in PRESETS:
        raise UnknownNameError("recipe", o.recipe, PRESETS)
    if not o.rank and o.dtype not in ("auto", "float32"):
        raise ConfigError("all weights are trained in float32: leave --dtype out, or give a --rank")
    if o.samples > 1 and o.temperature == 0:
        raise ConfigError("answers of temperature 0 are alike: give --temperature with --samples")
    _distill(o, PRESETS[o.recipe], "parallel", rank=o.rank, dtype=o.dtype, sampler=o.sampler,
             rounds=o.rounds, samples=o.samples, temperature=o.temperature)  # fmt: skip


def _distill(
    run: Run, settings: ObjectiveSettings, name: str, rank: int = 0, dtype: str = "auto",
    block: int = 0, mask_token_id: int | None = None, **how: Any,
) -> None:  # fmt: skip
    """One run of `train.recipes.distill`; ``block``: of an autoregressive model that learns to
    decode in blocks from what it was."""
    from ..models import load
    from ..train.loop import Schedule
    from ..train.processes import own_device
    from ..train.recipes.convert import in_blocks
    from ..train.recipes.distill import Distillation, finish, train

    report = run.report()
    if run.data and how["rounds"] == 1:
        unused("--data in one round", {"--answers": run.answers})
    folder = run.output or Path("runs") / name
    model = load(run.model, device=own_device(run.device), dtype=dtype if rank else "float32")
    teacher = model if block else None
    if block:
        model = in_blocks(model, block, mask_token_id)
    elif model.facts.mask_token_id is None:
        raise ConfigError(f"{model.name} is autoregressive: `dllm train convert` comes first")
    questions, held = run.asked(model)
    schedule = Schedule(
        run.steps, run.learning_rate, run.warmup, run.schedule,
        min(run.evaluate_every, run.steps), accumulate=run.accumulate, seed=run.seed,
    )  # fmt: skip
    recipe = Distillation(settings, schedule, run.rows, rank, **how)
    with resumable(folder):
        job = train(model, recipe, folder, questions, data=run.data or (), held_out=held,
                    report=report, teacher=teacher,
                    gradient_checkpointing=run.checkpointing)  # fmt: skip
        if job is None:
            return note(f"answers: {folder}")
        made = folder / ("adapter" if rank else "model")
        finish(job, model, recipe, made)
    note(f"{name}: {made}")


@dataclass(frozen=True, kw_only=True)
class Conversion(Run):
    """Options of ``dllm train convert``."""

    mask_token_id: int | None = setting(
        None, "Id of the mask token (default: an unused one).", TRAINING, min=0
    )
    block: int = setting(4, "Tokens per block.", TRAINING, min=1)
    rounds: int = setting(4, "Rounds on its own answers.", TRAINING, min=1)
    learning_rate: float = setting(1e-5, "Peak learning rate (OPDLM's).", TRAINING, min=0.0)


@takes(Conversion)
def convert(*, options: Conversion) -> None:
    """Make a block-diffusion model of an autoregressive one (OPDLM)."""
    from ..train.objectives.blocks import BlockSettings

    _distill(options, BlockSettings(), "convert", block=options.block,
             mask_token_id=options.mask_token_id, rounds=options.rounds)  # fmt: skip


for command, shown in (
    (deer, ()), (dflash.dflash, dflash.SHOWN), (parallel, SHOWN), (convert, SHOWN),
):  # fmt: skip
    train_app.command()(everywhere(command, shown))
