"""The loop of every recipe: transformers' Trainer around an objective.

An objective is a module whose forward takes a batch and returns ``{"loss": ...}``; a data set gives
the batch of a step, as a function of its number, so that a run that was stopped goes on as if
nothing had happened.  What a run is worth is said by a function of the objective: tokens per
forward, accuracy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401  (the Trainer needs it; missing, it is asked for here, by its extra)
import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import SchedulerType

from ..core.errors import ConfigError, UnknownNameError
from ..core.json_lines import whole_lines
from ..models.precision import native_bfloat16

Metrics = dict[str, float]
LOG = "log.jsonl"  # what a run said, an entry a line
STATE = "trainer_state.json"  # what the Trainer writes last into a checkpoint
RECIPE = "recipe.json"  # what determines a run


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.  ``schedule``: a name of transformers ("cosine", "linear", "constant",
    or "constant_with_warmup" for a run that will be continued); ``evaluate_every`` (0: never)
    and ``log_every`` count steps; a checkpoint is kept whenever the run is evaluated, or every
    ``save_every`` steps; ``accumulate``: batches per step."""

    steps: int = 2000
    learning_rate: float = 1e-3
    warmup: int = 50
    schedule: str = "cosine"
    evaluate_every: int = 200
    log_every: int = 20
    save_every: int = 0
    accumulate: int = 1
    clip: float = 1.0
    weight_decay: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        known = [kind.value for kind in SchedulerType]
        if self.schedule not in known:
            raise UnknownNameError("schedule", self.schedule, known)


class Loop(Trainer):
    """Everything is transformers', except what an evaluation measures."""

    def __init__(self, measure: Callable[[Any], Metrics] | None, **how: Any) -> None:
        super().__init__(**how)
        self.measure = measure

    def evaluate(self, *_: Any, **__: Any) -> Metrics:
        objective = self.accelerator.unwrap_model(self.model)
        metrics: Metrics = {}
        if self.measure is not None:
            objective.train(False)
            with torch.no_grad(), self.accelerator.autocast():
                metrics = {f"eval_{k}": v for k, v in self.measure(objective).items()}
            objective.train()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def loop(
    objective: nn.Module, data: Any, schedule: Schedule, folder: Path, *,
    measure: Callable[[Any], Metrics] | None = None, bf16: bool = False, device: str = "cpu",
    say: Callable[[str], None] | None = None, optimizers: Any = (None, None),
) -> Loop:  # fmt: skip
    """Everything set up; `resume` runs it.  ``data[i]`` is the batch of step ``i``; ``say`` is
    handed a line per log entry."""
    every = schedule.save_every or schedule.evaluate_every or schedule.steps
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=schedule.steps, per_device_train_batch_size=1,
        gradient_accumulation_steps=schedule.accumulate,
        learning_rate=schedule.learning_rate, lr_scheduler_type=schedule.schedule,
        warmup_steps=schedule.warmup, weight_decay=schedule.weight_decay, adam_beta2=0.95,
        max_grad_norm=schedule.clip, bf16=bf16, use_cpu=device == "cpu",
        train_sampling_strategy="sequential", save_strategy="steps", save_steps=every,
        eval_strategy="steps" if measure is not None and schedule.evaluate_every else "no",
        eval_steps=schedule.evaluate_every or None, save_total_limit=2,
        logging_steps=schedule.log_every, remove_unused_columns=False, report_to=[],
        seed=schedule.seed, dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    run = Loop(
        measure, model=objective, args=arguments, train_dataset=data, eval_dataset=data,
        data_collator=lambda batches: batches[0], callbacks=[Progress(folder, say)],
        optimizers=optimizers,
    )  # fmt: skip
    run.remove_callback(PrinterCallback)  # says what `Progress` says
    return run


def resume(run: Loop) -> None:
    """Train from the last checkpoint of the folder, or from the start."""
    last = last_checkpoint(Path(str(run.args.output_dir)))
    run.train(resume_from_checkpoint=None if last is None else str(last))


def last_checkpoint(folder: Path) -> Path | None:
    """The last one that is whole: a run may have been killed while it saved."""
    whole = [state.parent for state in folder.glob(f"checkpoint-*/{STATE}") if _readable(state)]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _readable(file: Path) -> bool:
    try:
        return bool(json.loads(file.read_bytes()))
    except ValueError:
        return False


def same_recipe(folder: Path, recipe: Any, **free: Any) -> None:
    """Write what determines a run into its folder, or raise `ConfigError` when another run is
    there.  Only the fields in ``free`` may change between the parts of a run."""
    file, settings = folder / RECIPE, json.loads(json.dumps(asdict(recipe)))
    if file.exists():
        begun = json.loads(file.read_text(encoding="utf-8"))
        if begun | free != settings | free:
            changed = ", ".join(sorted(k for k in begun | settings if k not in free
                                       and begun.get(k) != settings.get(k)))  # fmt: skip
            raise ConfigError(
                f"{folder} holds a run of another recipe, with another {changed}: choose another "
                "folder or repeat its options"
            )
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


class Progress(TrainerCallback):
    """Writes every log entry to a file of the run, and hands it on as a line."""

    def __init__(self, folder: Path, say: Callable[[str], None] | None) -> None:
        self.folder, self.say = folder, say

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What was said behind the checkpoint that a run goes on from will be said again."""
        file = self.folder / LOG
        if state.is_world_process_zero and file.exists():
            entries = map(json.loads, whole_lines(file))
            kept = [e for e in entries if e["step"] <= state.global_step and "train_loss" not in e]
            file.write_text("".join(json.dumps(e) + "\n" for e in kept), encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs: Mapping[str, Any] = kwargs.get("logs") or {}
        entry = {"step": state.global_step, **logs}
        if state.is_world_process_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / LOG).open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry) + "\n")
        shown = {k.removeprefix("eval_"): v for k, v in logs.items() if k.startswith("eval_")}
        if "loss" in logs:
            shown = {"loss": logs["loss"]}
        if self.say is not None and shown:
            words = ", ".join(f"{name.replace('_', ' ')} {value:.4g}"
                              for name, value in shown.items())  # fmt: skip
            self.say(f"step {state.global_step}/{state.max_steps}: {words}")


def machine_has_bf16(device: str) -> bool:
    """Whether bfloat16 products are faster here than float32."""
    return native_bfloat16() if device == "cpu" else bool(torch.cuda.is_bf16_supported())
