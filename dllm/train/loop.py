"""The loop of every recipe: transformers' Trainer around an objective.

An objective is a module whose forward takes a batch and returns ``{"loss": ...}``; a data set gives
the batch of a step, as a function of its number, so that a run that was stopped goes on as if
nothing had happened.  What a run is worth is said by the loss of held-out batches, and by a
function of the objective: tokens per forward, accuracy.
"""

import json
import math
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401  (the Trainer needs it; missing, it is asked for here, by its extra)
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ..core.errors import ConfigError, DllmError, NumericError, UnknownNameError, one_line
from ..core.json_lines import read_state, whole_lines, write_whole
from ..models.precision import native_bfloat16
from .processes import is_first, shared, world

Metrics = dict[str, float]
LOG = "log.jsonl"  # what a run said, an entry a line
STATE = "trainer_state.json"  # what the Trainer writes last into a checkpoint
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.pt", "scheduler.pt"
RECIPE = "recipe.json"  # what determines a run
# Names of transformers that say all; others take numbers or a loss, too.
SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant",
             "constant_with_warmup", "inverse_sqrt")  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.  ``schedule``: a name of transformers ("cosine", "linear", "constant",
    or "constant_with_warmup" for a run that will be continued); ``evaluate_every`` counts steps (0:
    never); a checkpoint is kept whenever the run is evaluated, or every ``save_every`` steps;
    ``accumulate``: batches per step, of all processes together."""

    steps: int = 2000
    learning_rate: float = 1e-3
    warmup: int = 50
    schedule: str = "cosine"
    evaluate_every: int = 200
    save_every: int = 0
    accumulate: int = 1
    clip: float = 1.0
    weight_decay: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UnknownNameError("schedule", self.schedule, SCHEDULES)


@dataclass(frozen=True)
class Report:
    """What a run says, and to whom.  ``say`` is handed a line per log entry, which are
    ``log_every`` steps apart; ``to``: names of transformers' integrations, such as "tensorboard"
    and "wandb"."""

    say: Callable[[str], None] | None = None
    log_every: int = 20
    to: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in self.to:
            if name not in INTEGRATION_TO_CALLBACK:
                raise UnknownNameError("integration", name, INTEGRATION_TO_CALLBACK)


SILENT = Report()


class OneDevice(TrainingArguments):
    """Of a process that trains on the device of its model alone: otherwise transformers would
    spread every batch over all GPUs that the process sees."""

    chosen = torch.device("cuda")

    @property
    def device(self) -> torch.device:
        if world() == 1 and self.chosen.index is not None:
            torch.cuda.set_device(self.chosen)  # accelerate asks for it
            return self.chosen
        return super().device

    @property
    def n_gpu(self) -> int:
        return min(1, int(super().n_gpu))


class Loop(Trainer):
    """Everything is transformers', except what an evaluation measures, and that checkpoints hold
    what is trained alone."""

    def __init__(self, measure: Callable[[Any], Metrics] | None, held: Any, **how: Any) -> None:
        super().__init__(**how)
        self.measure, self.held = measure, held

    def evaluate(self, *_: Any, **__: Any) -> Metrics:
        """Loss of the held-out batches, and what is measured."""
        objective = self.accelerator.unwrap_model(self.model)
        metrics: Metrics = {}
        objective.train(False)
        with torch.no_grad(), self.accelerator.autocast():
            if self.held:
                device = self.args.device
                losses = [
                    float(objective(**{k: v.to(device) for k, v in batch.items()})["loss"])
                    for batch in map(self.held.__getitem__, range(len(self.held)))
                ]
                metrics["eval_loss"] = sum(losses) / len(losses)
            if self.measure is not None:
                metrics |= {f"eval_{k}": v for k, v in self.measure(objective).items()}
        objective.train()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Without the weights that are not trained, of which a checkpoint needs no copy."""
        model: Any = self.model
        named = model.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in named if not parameter.requires_grad}
        state = model.state_dict() if state_dict is None else state_dict
        super()._save(output_dir, {k: v for k, v in state.items() if k not in frozen})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        model = self.model if model is None else model
        with readable(resume_from_checkpoint):
            weights = load_file(Path(resume_from_checkpoint) / WEIGHTS)
        lacking, other = model.load_state_dict(weights, strict=False)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        if other or trained & {*lacking}:
            raise ConfigError(
                f"{resume_from_checkpoint} holds the weights of another network: choose another "
                "folder"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with readable(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with readable(checkpoint):
            super()._load_rng_state(checkpoint)

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *arguments: Any, **more: Any
    ) -> None:
        """Nothing is measured or saved of weights that the step made NaN."""
        if not all(math.isfinite(number) for number in (tr_loss, grad_norm) if number is not None):
            raise NumericError(
                f"the loss or the gradient of step {self.state.global_step} is not finite: train "
                "in another folder, with a lower learning rate"
            )
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *arguments, **more)

    def _save_checkpoint(self, *arguments: Any, **more: Any) -> None:
        try:
            super()._save_checkpoint(*arguments, **more)
        except (OSError, SafetensorError, RuntimeError) as error:
            why = str(error).strip().partition("\n")[0]
            raise DllmError(
                f"cannot save a checkpoint in {self.args.output_dir} ({why}): make room there; the "
                "same command goes on from the last one that is whole"
            ) from error


def loop(
    objective: nn.Module, data: Any, schedule: Schedule, folder: Path, *,
    measure: Callable[[Any], Metrics] | None = None, held: Any = (), bf16: bool = False,
    device: str = "cpu", report: Report = SILENT, optimizers: Any = (None, None),
) -> Loop:  # fmt: skip
    """Everything set up; `resume` runs it.  ``data[i]`` is batch ``i`` of the run, which takes
    ``accumulate`` of them per step; ``held``: batches whose loss every evaluation says."""
    every = schedule.save_every or schedule.evaluate_every or schedule.steps
    evaluated = (measure is not None or len(held) > 0) and schedule.evaluate_every
    arguments = OneDevice(
        output_dir=str(folder), max_steps=schedule.steps, per_device_train_batch_size=1,
        gradient_accumulation_steps=shared(schedule.accumulate),
        learning_rate=schedule.learning_rate, lr_scheduler_type=schedule.schedule,
        warmup_steps=schedule.warmup, weight_decay=schedule.weight_decay, adam_beta2=0.95,
        max_grad_norm=schedule.clip, bf16=bf16, use_cpu=device == "cpu",
        train_sampling_strategy="sequential", save_strategy="steps", save_steps=every,
        eval_strategy="steps" if evaluated else "no",
        eval_steps=schedule.evaluate_every or None, save_total_limit=2,
        logging_steps=report.log_every, remove_unused_columns=False, report_to=[*report.to],
        seed=schedule.seed, dataloader_pin_memory=False, disable_tqdm=True,
        logging_nan_inf_filter=False, ddp_broadcast_buffers=False,  # they are the verifier's
    )  # fmt: skip
    arguments.chosen = torch.device(device)
    try:
        run = Loop(
            measure, held, model=objective, args=arguments, train_dataset=data, eval_dataset=data,
            data_collator=lambda batches: batches[0],
            callbacks=[Progress(folder, report.say if is_first() else None)], optimizers=optimizers,
        )  # fmt: skip
    except RuntimeError as error:  # an integration whose package is missing
        if not report.to:
            raise
        raise ConfigError(f"cannot report to {', '.join(report.to)}: {error}") from error
    run.remove_callback(PrinterCallback)  # says what `Progress` says
    return run


def resume(run: Loop) -> None:
    """Train from the last checkpoint of the folder, or from the start.  Ctrl-C, SIGTERM and SIGHUP
    end the step, save, and then do what they did before; a second time they end it at once."""
    last = last_checkpoint(Path(str(run.args.output_dir)))
    with saved_when_stopped(run):
        run.train(resume_from_checkpoint=None if last is None else str(last))


@contextmanager
def saved_when_stopped(run: Loop) -> Iterator[None]:
    """Where one process alone trains, its signals stop it behind a step, with a checkpoint."""
    if run.args.world_size > 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    stop = Stop()
    before = {
        number: signal.signal(number, stop)
        for number in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGINT)}
        if signal.getsignal(number) is not signal.SIG_IGN  # as nohup has it
    }
    run.add_callback(stop)
    try:
        yield
    finally:
        run.remove_callback(stop)
        for number, handler in before.items():
            signal.signal(number, handler)
    if stop.number is not None:
        signal.raise_signal(stop.number)  # to whoever handled it before


class Stop(TrainerCallback):
    """Handles a signal: the run saves and ends behind the present step."""

    number: int | None = None

    def __call__(self, number: int, _: Any) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.number is not None:
            control.should_save = control.should_training_stop = True


def last_checkpoint(folder: Path) -> Path | None:
    """The last one that is whole: a run may have been killed while it saved."""
    whole = [
        path for path in folder.glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdecimal() and read_state(path / STATE)
        and all((path / file).is_file() for file in (WEIGHTS, *OPTIMIZER))
    ]  # fmt: skip
    return max(whole, key=lambda path: int(path.name.removeprefix("checkpoint-")), default=None)


@contextmanager
def readable(checkpoint: str | None) -> Iterator[None]:
    """Raises `ConfigError` where the files of a ``checkpoint`` cannot be read."""
    try:
        yield
    except Exception as error:  # safetensors, torch and pickle have types of their own
        raise ConfigError(
            f"{checkpoint} is damaged ({one_line(error, 80)}): delete it, and the same command "
            "goes on from the one before"
        ) from error


def same_recipe(folder: Path, recipe: Any, base: str = "", **free: Any) -> None:
    """Write what determines a run of the model ``base`` into its folder, or raise `ConfigError`
    when another run is there.  Only the fields in ``free`` may change between its parts."""
    about = {"base": base} if base else {}
    fields = recipe if isinstance(recipe, dict) else asdict(recipe)
    file, settings = folder / RECIPE, json.loads(json.dumps(about | fields))
    begun = read_state(file) and about | read_state(file)
    changed = ", ".join(sorted(k for k in begun | settings if k not in free
                               and begun.get(k) != settings.get(k)))  # fmt: skip
    if begun and changed:
        raise ConfigError(
            f"{folder} holds a run of another recipe, with another {changed}: choose another "
            "folder or repeat its options"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(settings, indent=1) + "\n")


def same_answers(folder: Path, answers: Sequence[Any]) -> None:
    """`same_recipe` of what the run in ``folder`` learns from, by the `repr` of each answer."""
    checksum = 0
    for answer in answers:
        checksum = zlib.crc32(repr(answer).encode(), checksum)
    same_recipe(folder, {"number_of_answers": len(answers), "answers_checksum": checksum})


class Progress(TrainerCallback):
    """Writes every log entry to a file of the run, and hands it on as a line."""

    def __init__(self, folder: Path, say: Callable[[str], None] | None) -> None:
        self.folder, self.say = folder, say

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What was said behind the checkpoint that a run goes on from will be said again."""
        file = self.folder / LOG
        if state.is_world_process_zero and file.exists():
            try:
                kept = [
                    line + b"\n" for line in whole_lines(file)
                    for entry in [json.loads(line)]
                    if entry["step"] <= state.global_step and "train_runtime" not in entry
                ]  # fmt: skip
            except (ValueError, LookupError, TypeError, OSError) as error:
                raise ConfigError(
                    f"{file} is damaged: move it away, and the same command goes on"
                ) from error
            write_whole(file, b"".join(kept).decode())

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs: Mapping[str, Any] = kwargs.get("logs") or {}
        entry = {"step": state.global_step, **logs}
        entry.pop("train_loss", None)  # it leaves out what was trained before a stop
        if state.is_world_process_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / LOG).open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry) + "\n")
        shown = {k.removeprefix("eval_"): v for k, v in logs.items() if k.startswith("eval_")}
        if "loss" in shown:
            shown = {"held-out loss": shown.pop("loss")} | shown
        if "loss" in logs:
            shown = {"loss": logs["loss"]}
        if self.say is not None and shown:
            words = ", ".join(f"{name.replace('_', ' ')} {value:.4g}"
                              for name, value in shown.items())  # fmt: skip
            with suppress(OSError):  # nobody listens any more: the terminal was closed
                self.say(f"step {state.global_step}/{state.max_steps}: {words}")


def machine_has_bf16(device: str) -> bool:
    """Whether bfloat16 products are faster here than float32."""
    if device == "cpu":
        return native_bfloat16()
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))
