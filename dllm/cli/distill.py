"""``dllm train parallel`` and ``convert``: what a model learns from its own answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..core.errors import ConfigError, UnknownNameError
from .dflash import DATA, OUTPUT, TRAINING
from .inputs import read_lines
from .options import option, takes
from .output import note

if TYPE_CHECKING:
    from ..train.loop import Schedule
    from ..train.recipes.distill import ObjectiveSettings
    from ..train.trajectories import Question


def setting(text: str, panel: str, *names: str, **more: Any) -> Any:
    """An option with its default."""
    return option(text, panel, *names, show_default=True, **more)


@dataclass(frozen=True)
class Run:
    """Options of both commands."""

    model: Annotated[str, setting("Hub id, folder or bundled name.", DATA, "--model", "-m")]
    prompts: Annotated[
        Path | None, setting("Prompts, one per line; default: generated tasks.", DATA)
    ] = None
    tasks: Annotated[
        str | None, setting("Of the generated ones, e.g. story2,shuffle; default: all.", DATA)
    ] = None
    data: Annotated[
        list[Path] | None, setting("Files that a run has written before; repeatable.", DATA)
    ] = None
    answers: Annotated[int, setting("Prompts to answer.", DATA, min=1)] = 2000
    held_out: Annotated[int, setting("Prompts to measure with.", DATA, min=1)] = 64
    steps: Annotated[int, setting("Steps in all; 0 only writes answers.", TRAINING, min=0)] = 1000
    rows: Annotated[int, setting("Answers per step.", TRAINING, min=1)] = 8
    rank: Annotated[
        int | None,
        setting("Of the adapter, 32 by default; 0 trains all weights.", TRAINING, min=0),
    ] = None  # fmt: skip
    learning_rate: Annotated[float | None, setting("Peak; default: 2e-5.", TRAINING, min=0.0)] = (
        None
    )
    schedule: Annotated[str, setting("A name of transformers.", TRAINING)] = "cosine"
    warmup: Annotated[int, setting("Steps.", TRAINING, min=0)] = 20
    accumulate: Annotated[int, setting("Batches per step.", TRAINING, min=1)] = 1
    evaluate_every: Annotated[int, setting("Steps.", TRAINING, min=1)] = 100
    checkpointing: Annotated[
        bool,
        setting("Recompute activations instead of keeping them.", TRAINING,
                "--checkpointing/--no-checkpointing"),
    ] = False  # fmt: skip
    device: Annotated[str, setting("cpu, cuda, ...", TRAINING)] = "cpu"
    dtype: Annotated[str, setting("Of the weights that are not trained.", TRAINING)] = "auto"
    seed: Annotated[int, setting("Of prompts and batches.", TRAINING, min=0)] = 0
    output: Annotated[Path | None, setting("Folder of the run.", OUTPUT, "--output", "-o")] = None

    def ranked(self, default: int) -> Run:
        """These options with a rank."""
        return self if self.rank is not None else replace(self, rank=default)

    def asked(self) -> tuple[Callable[[int], list[Question]], list[Question]]:
        """The questions of a round, and those that are held out."""
        from ..eval.tasks import TASKS
        from ..train.trajectories import Question, task_questions

        tasks = tuple(TASKS) if self.tasks is None else tuple(self.tasks.split(","))
        for task in set(tasks) - set(TASKS):
            raise UnknownNameError("task", task, TASKS)
        if self.prompts is None:
            held = task_questions(self.held_out, self.seed, tasks, "test")
        else:
            lines = [Question(line) for line in read_lines(self.prompts)]
            own, held = lines[: -self.held_out] or lines, lines[-self.held_out :]

        def questions(number: int) -> list[Question]:
            if self.prompts is not None:
                return own
            return task_questions(self.answers, self.seed + number, tasks)

        return questions, held

    def scheduled(self) -> Schedule:
        """Of a model that has been trained before."""
        from ..train.loop import Schedule

        return Schedule(
            self.steps, self.learning_rate or 2e-5, self.warmup, self.schedule,
            min(self.evaluate_every, self.steps), accumulate=self.accumulate, seed=self.seed,
        )  # fmt: skip


@takes(Run)
def parallel(
    options: Run,
    recipe: Annotated[str, setting("tad, dparallel or d3llm.", TRAINING)] = "tad",
    delta: Annotated[
        int | None, setting("Steps within which a token is learnt; 0: all.", TRAINING, min=0)
    ] = None,
    reference: Annotated[bool | None, setting("Show the teacher the answer.", TRAINING)] = None,
    kl: Annotated[float | None, setting("Weight of the divergence.", TRAINING, min=0.0)] = None,
    entropy: Annotated[float | None, setting("Weight of the entropy term.", TRAINING)] = None,
    state: Annotated[
        str | None, setting("Where masks stand: trajectory, random or order.", TRAINING)
    ] = None,
    ratio: Annotated[
        str | None,
        setting("Share of a block that is masked, or from,to; not of trajectories.", TRAINING),
    ] = None,
    sampler: Annotated[
        str, setting("Decodes the trajectories, and measures.", DATA)
    ] = "threshold(0.9)",
    rounds: Annotated[
        int, setting("Decode and train so often, each time with what was trained.", TRAINING, min=1)
    ] = 1,
    samples: Annotated[
        int, setting("Answers to a prompt; the fastest right one is learnt.", DATA, min=1)
    ] = 1,
    temperature: Annotated[float, setting("Of the answers.", DATA, min=0.0)] = 0.0,
) -> None:
    """Teach a diffusion model to decide more tokens per forward (TAD, dParallel, d3LLM)."""
    from ..train.objectives.parallel import PRESETS

    try:
        shares = None if ratio is None else [float(share) for share in ratio.split(",")]
        if shares and len(shares) > 2:
            raise ValueError
    except ValueError:
        raise ConfigError(f"--ratio is a share or two, e.g. 0.0,0.8, not {ratio!r}") from None
    given: dict[str, Any] = {
        "delta": delta, "reference": reference, "kl": kl, "entropy": entropy, "state": state,
        "ratio": shares and (shares[0], shares[-1]),
    }  # fmt: skip
    if recipe not in PRESETS:
        raise UnknownNameError("recipe", recipe, PRESETS)
    settings = replace(PRESETS[recipe], **{k: v for k, v in given.items() if v is not None})
    _distill(options, settings, "parallel", sampler=sampler, rounds=rounds, samples=samples,
             temperature=temperature)  # fmt: skip


def _distill(
    run: Run, settings: ObjectiveSettings, name: str, block: int = 0,
    mask_token_id: int | None = None, **how: Any,
) -> None:  # fmt: skip
    """One run of `train.recipes.distill`; ``block``: of an autoregressive model that learns to
    decode in blocks from what it was."""
    from ..models import load
    from ..train.recipes.convert import in_blocks
    from ..train.recipes.distill import Distillation, finish, train

    run = run.ranked(32)
    assert run.rank is not None
    folder = run.output or Path("runs") / name
    model = load(run.model, device=run.device, dtype=run.dtype if run.rank else "float32")
    teacher = model if block else None
    if block:
        model = in_blocks(model, block, mask_token_id)
    elif model.facts.mask_token_id is None:
        raise ConfigError(f"{model.name} is autoregressive: `dllm train convert` comes first")
    questions, held = run.asked()
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Distillation(settings, run.scheduled(), run.rows, run.rank, **how)
    job = train(model, recipe, folder, questions, data=run.data or (), held_out=held, say=note,
                teacher=teacher, gradient_checkpointing=run.checkpointing)  # fmt: skip
    if job is None:
        return note(f"answers: {folder}")
    finish(job, model, recipe, folder / ("adapter" if run.rank else "model"))
    note(f"{name}: {folder / ('adapter' if run.rank else 'model')}")


@takes(Run)
def convert(
    options: Run,
    mask_token_id: Annotated[int | None, setting("Default: an id to spare.", TRAINING)] = None,
    block: Annotated[int, setting("Tokens of a block.", TRAINING, min=1)] = 4,
    rounds: Annotated[int, setting("Rounds on its own answers.", TRAINING, min=1)] = 4,
) -> None:
    """Make a block-diffusion model of an autoregressive one (OPDLM)."""
    from ..train.objectives.blocks import BlockSettings

    if options.rank:
        raise ConfigError("a conversion trains all weights: leave --rank out")
    _distill(replace(options, rank=0), BlockSettings(), "convert", block=block,
             mask_token_id=mask_token_id, rounds=rounds)  # fmt: skip


COMMANDS = (parallel, convert)
