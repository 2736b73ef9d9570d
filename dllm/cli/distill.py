"""``dllm train parallel``, ``repair``, ``reward`` and ``convert``: what a model learns from its own
answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import ConfigError, UnknownNameError
from .dflash import DATA, OUTPUT, TRAINING, loaded, written_answers
from .inputs import read_lines
from .options import option, takes
from .output import note

if TYPE_CHECKING:
    from ..train.forecast import Load
    from ..train.loop import Schedule
    from ..train.recipes.distill import ObjectiveSettings
    from ..train.trajectories import Question


def setting(text: str, panel: str, *names: str, **more: Any) -> Any:
    """An option with its default."""
    return option(text, panel, *names, show_default=True, **more)


@dataclass(frozen=True)
class Run:
    """Options of all four commands."""

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
        setting("Of the adapter, 32 by default; 0 trains all weights (form 'block').", TRAINING,
                min=0),
    ] = None  # fmt: skip
    learning_rate: Annotated[
        float | None, setting("Peak; default: 2e-5, convert 1e-3.", TRAINING, min=0.0)
    ] = None
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
    dry_run: Annotated[bool, setting("Only say what it would take.", OUTPUT, "--dry-run")] = False
    on: Annotated[str | None, setting("Card of the dry run, e.g. H100.", OUTPUT)] = None
    tflops: Annotated[float, setting("Of the dry run's hardware.", OUTPUT, min=0.001)] = 100.0
    memory: Annotated[float, setting("Of the dry run's hardware, GB.", OUTPUT, min=0.1)] = 24.0
    length: Annotated[int, setting("Tokens of a text in the dry run.", OUTPUT, min=1)] = 512

    def ranked(self, default: int) -> Run:
        """These options with a rank."""
        return self if self.rank is not None else replace(self, rank=default)

    def forecast(self, load: Load) -> None:
        """Say what a run would take."""
        from ..train.forecast import forecast
        from .capacity import CARDS

        if self.on is not None and self.on not in CARDS:
            raise UnknownNameError("card", self.on, CARDS)
        speed, room = self.tflops * 1e12, self.memory * 1e9
        if self.on is not None:
            speed, room = CARDS[self.on].operations, CARDS[self.on].memory
        for line in forecast(self.model, load, speed, room):
            note(line)

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
    given = {
        "delta": delta, "reference": reference, "kl": kl, "entropy": entropy, "state": state,
        "ratio": shares and (shares[0], shares[-1]),
    }  # fmt: skip
    settings = replace(
        _preset(PRESETS, recipe), **{k: v for k, v in given.items() if v is not None}
    )
    _distill(options, settings, "parallel", sampler=sampler, rounds=rounds, samples=samples,
             temperature=temperature)  # fmt: skip


@takes(Run)
def repair(
    options: Run,
    recipe: Annotated[str, setting("dmax, llada2.1 or both.", TRAINING)] = "dmax",
    sampler: Annotated[str, setting("Decodes the answers, and measures.", DATA)] = "threshold(0.9)",
) -> None:
    """Teach a diffusion model to correct what it decided (DMax, LLaDA2.1)."""
    from ..train.objectives.repair import PRESETS

    _distill(options, _preset(PRESETS, recipe), "repair", sampler=sampler)


def _preset(presets: Any, name: str) -> Any:
    if name not in presets:
        raise UnknownNameError("recipe", name, presets)
    return presets[name]


def _distill(
    run: Run, settings: ObjectiveSettings, name: str, block: int = 0,
    mask_token_id: int | None = None, **how: Any,
) -> None:  # fmt: skip
    """One run of `train.recipes.distill`; ``block``: of an autoregressive model that learns to
    decode in blocks from what it was."""
    from ..models import load
    from ..train.forecast import Load
    from ..train.recipes.convert import in_blocks
    from ..train.recipes.distill import Distillation, finish, train

    run = run.ranked(32)
    assert run.rank is not None
    if run.dry_run:
        kl = bool(getattr(settings, "kl", block))
        others = 1.0 if kl else getattr(settings, "on_policy", 0.0)
        rows = run.rows * (1 + getattr(settings, "complement", False)) * (2 if block else 1)
        return run.forecast(Load(rows, run.length, run.rank, others, kl and not run.rank,
                                 recomputed=run.checkpointing))  # fmt: skip
    folder = run.output or Path("runs") / name
    folder.mkdir(parents=True, exist_ok=True)
    model = load(run.model, device=run.device, dtype=run.dtype if run.rank else "float32")
    teacher = model if block else None
    if block:
        model = in_blocks(model, block, mask_token_id)
    elif model.facts.mask_token_id is None:
        raise ConfigError(f"{model.name} is autoregressive: `dllm train convert` comes first")
    questions, held = run.asked()
    recipe = Distillation(settings, run.scheduled(), run.rows, run.rank, **how)
    job = train(model, recipe, folder, questions, data=run.data or (), held_out=held, say=note,
                teacher=teacher, gradient_checkpointing=run.checkpointing)  # fmt: skip
    if job is None:
        return note(f"answers: {folder}")
    finish(job, model, recipe, folder / ("adapter" if run.rank else "model"))
    note(f"{name}: {folder / ('adapter' if run.rank else 'model')}")


@takes(Run)
def reward(
    options: Run,
    questions: Annotated[int, setting("Prompts per step.", TRAINING, min=1)] = 16,
    samples: Annotated[int, setting("Answers to a prompt.", TRAINING, min=2)] = 8,
    temperature: Annotated[float, setting("Of the answers.", TRAINING)] = 1.0,
    speed: Annotated[
        float, setting("Weight of tokens per forward beside accuracy.", TRAINING, min=0.0)
    ] = 1.0,
    kl: Annotated[float, setting("Weight of the divergence.", TRAINING, min=0.0)] = 0.01,
    nll: Annotated[
        float, setting("Weight of the likelihood of right answers.", TRAINING, min=0.0)
    ] = 0.1,
    sampler: Annotated[str, setting("Writes the answers, and measures.", DATA)] = "threshold(0.9)",
) -> None:
    """Reward a diffusion model for right answers in few forwards (LightningRL).  `--rows`: texts
    that go through the network at once; a step has one for each forward of each answer."""
    from ..models import load
    from ..train.forecast import Load
    from ..train.objectives.reward import RewardSettings
    from ..train.recipes.distill import finish
    from ..train.recipes.reward import Reinforcement, train

    run = options.ranked(32)
    assert run.rank is not None
    settings = RewardSettings(samples, temperature, speed, kl, nll, rows=run.rows)
    recipe = Reinforcement(settings, run.scheduled(), questions, run.rank, sampler)
    if run.data or run.prompts is not None:
        raise ConfigError(
            "rewards are of answers that are written while it learns, to tasks that say what is "
            "right: leave --data and --prompts out, name --tasks"
        )
    if run.dry_run:
        note(f"one pass of {run.rows} texts; a step has one text for each forward of "
             f"{questions * samples} answers")  # fmt: skip
        return run.forecast(Load(run.rows, run.length, run.rank, 3.0, not run.rank))
    folder = run.output or Path("runs/reward")
    folder.mkdir(parents=True, exist_ok=True)
    model = load(run.model, device=run.device, dtype=run.dtype if run.rank else "float32")
    if model.facts.mask_token_id is None:
        raise ConfigError(f"{model.name} is autoregressive: `dllm train convert` comes first")
    pool, held = run.asked()
    job = train(model, recipe, folder, pool(0), held_out=held, say=note,
                gradient_checkpointing=run.checkpointing)  # fmt: skip
    finish(job, model, recipe, folder / ("adapter" if run.rank else "model"))
    note(f"reward: {folder / ('adapter' if run.rank else 'model')}")


@takes(Run)
def convert(
    options: Run,
    masks: Annotated[int, setting("Tokens drafted at once.", TRAINING, min=1)] = 3,
    anchors: Annotated[int, setting("Places per answer and step.", TRAINING, min=1)] = 64,
    mask_token_id: Annotated[int | None, setting("Default: an id to spare.", TRAINING)] = None,
    max_new_tokens: Annotated[int, setting("Longest answer that fits.", DATA, min=8)] = 200,
    form: Annotated[
        str, setting("'gated', an adapter for masks, or 'block', a model of its own.", TRAINING)
    ] = "gated",
    block: Annotated[int, setting("Tokens of a block; form 'block'.", TRAINING, min=1)] = 4,
    rounds: Annotated[
        int, setting("Form 'block': rounds on its own answers.", TRAINING, min=1)
    ] = 4,
) -> None:
    """Teach an autoregressive model to fill in masks, and leave it as it is for everything else."""
    if form not in ("gated", "block"):
        raise ConfigError(f"the form is 'gated' or 'block', not {form!r}")
    run = options.ranked(0 if form == "block" else 32)
    if form == "block":
        from ..train.objectives.blocks import BlockSettings

        if run.rank:
            raise ConfigError("form 'block' trains all weights: leave --rank out")
        _distill(run, BlockSettings(), "convert", block=block, mask_token_id=mask_token_id,
                 rounds=rounds)  # fmt: skip
        return
    if not run.rank:
        raise ConfigError("form 'gated' trains an adapter: --rank is at least 1")
    from ..train.dflash.recipe import Schedule
    from ..train.forecast import Load
    from ..train.loop import machine_has_bf16, resume
    from ..train.recipes.convert import Conversion, causal, finish, start

    if run.dry_run:
        rows = run.rows * anchors * masks
        others = run.rows * run.length / rows
        run.forecast(Load(rows, 1, run.rank, others, recomputed=False, head=1024))
        return
    model = causal(loaded(run.model, run.device, run.dtype))
    folder = run.output or Path("runs/convert")
    folder.mkdir(parents=True, exist_ok=True)
    lines = None if run.prompts is None else read_lines(run.prompts)
    files = written_answers(model, run.data or [], folder, run.answers, max_new_tokens, run.seed,
                          lines)  # fmt: skip
    recipe = Conversion(
        masks, run.rank, mask_token_id, held_out=max(2, run.answers // run.held_out),
        schedule=Schedule(run.steps, run.learning_rate or 1e-3, run.warmup, run.schedule,
                          min(run.evaluate_every, run.steps), accumulate=run.accumulate,
                          seed=run.seed, rows=run.rows, anchors=anchors, weight_decay=0.0),
    )  # fmt: skip
    job, split = start(model, files, recipe, folder, bf16=machine_has_bf16(run.device), say=note)
    resume(job)
    finish(job, model, recipe, split, folder / "adapter")
    note(f"adapter: {folder / 'adapter'}")


COMMANDS = (parallel, repair, reward, convert)
