"""A run: transformers' Trainer around `Trainee`, acceptance as its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from .data import Answer, Batches, Taps
from .evaluate import acceptance
from .objective import Trainee


@dataclass(frozen=True)
class Schedule:
    """``rows`` answers with ``anchors`` blocks each per step; ``schedule``: "cosine", or
    "constant_with_warmup" for a run that will be continued on more data."""

    steps: int = 2000
    rows: int = 8
    anchors: int = 48
    learning_rate: float = 1e-3
    warmup: int = 50
    schedule: str = "cosine"
    evaluate_every: int = 200
    seed: int = 0


class DrafterTrainer(Trainer):
    """Evaluates by drafting; everything else is transformers'."""

    def __init__(self, trainee: Trainee, held_out: Sequence[Answer], taps: Taps, **how: Any):
        super().__init__(model=trainee, **how)
        self.held_out, self.taps = held_out, taps

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        trainee: Any = self.accelerator.unwrap_model(self.model)
        with self.accelerator.autocast():
            got = acceptance(trainee, self.held_out, self.taps, 4)
        metrics = {"eval_tokens_per_forward": got.per_forward}
        if trainee.walk is not None:
            with self.accelerator.autocast():
                alone = acceptance(trainee, self.held_out, self.taps, 4, walking=False)
            metrics["eval_without_head"] = alone.per_forward
        for k in range(len(got.reached)):
            metrics[f"eval_reached_{k + 1}"] = got.reached[k]
            metrics[f"eval_right_{k + 1}"] = got.right[k]
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def trainer(
    trainee: Trainee, answers: Sequence[Answer], held_out: Sequence[Answer], schedule: Schedule,
    folder: Path, taps: Taps, *, bf16: bool, device: str, callbacks: Sequence[Any] = (),
) -> DrafterTrainer:  # fmt: skip
    """Everything set up; ``resume`` runs it."""
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=schedule.steps, per_device_train_batch_size=1,
        learning_rate=schedule.learning_rate, lr_scheduler_type=schedule.schedule,
        warmup_steps=schedule.warmup, weight_decay=0.01, adam_beta2=0.95, max_grad_norm=1.0,
        bf16=bf16, use_cpu=device == "cpu", train_sampling_strategy="sequential",
        eval_strategy="steps", eval_steps=schedule.evaluate_every, save_strategy="steps",
        save_steps=schedule.evaluate_every, save_total_limit=2, logging_steps=20,
        remove_unused_columns=False, report_to=[], seed=schedule.seed, dataloader_pin_memory=False,
        disable_tqdm=True,
    )  # fmt: skip
    data = Batches(answers, schedule.rows, schedule.anchors, schedule.seed, schedule.steps, taps)
    run = DrafterTrainer(
        trainee, held_out, taps, args=arguments, train_dataset=data, eval_dataset=data,
        data_collator=lambda batches: batches[0], callbacks=list(callbacks),
    )  # fmt: skip
    run.remove_callback(PrinterCallback)  # says what `callbacks` say
    return run


def resume(run: DrafterTrainer) -> None:
    """Train from the last checkpoint of the folder, or from the start."""
    folder = str(run.args.output_dir)
    last = None
    if Path(folder).is_dir():
        last = get_last_checkpoint(folder)  # type: ignore[no-untyped-call]
    run.train(resume_from_checkpoint=last)


def machine_has_bf16(device: str) -> bool:
    """Whether bfloat16 products are faster here than float32: asked of the processor."""
    if device != "cpu":
        return bool(torch.cuda.is_bf16_supported())
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def progress(say: Callable[[str], None]) -> TrainerCallback:
    """Hands every log entry of a run to ``say``, as a line."""

    class Lines(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs = kwargs.get("logs") or {}
            if "loss" in logs:
                say(f"step {state.global_step}/{state.max_steps} loss {logs['loss']:.4f}")
            if "eval_tokens_per_forward" in logs:
                reached = [v for k, v in logs.items() if k.startswith("eval_reached_")]
                shares = " ".join(f"{value:.2f}" for value in reached)
                say(f"step {state.global_step}: {logs['eval_tokens_per_forward']:.3f} tokens per "
                    f"forward on held-out answers, drafts accepted {shares}")  # fmt: skip

    return Lines()
