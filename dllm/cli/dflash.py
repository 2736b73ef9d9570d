"""``dllm train dflash``: a block-diffusion drafter for any causal model."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigError, DllmError
from ..core.json_lines import lock
from .options import option, takes
from .output import note

if TYPE_CHECKING:
    from ..models import DiffusionModel
    from ..train.dflash.recipe import DFlashTraining
    from ..train.loop import Report

# Options of the help page; --help-all has all.
SHOWN = (
    "verifier data answers steps layers block_size "
    "markov_rank learning_rate weights_from device output seed"
).split()
DATA, SHAPE, TRAINING, OUTPUT = "Data", "Drafter", "Training", "Output"
FULL = ENOSPC, EDQUOT  # of a disk


def setting(default: Any, text: str, panel: str, *names: str, **more: Any) -> Any:
    """An option of a training, with its default on the help page."""
    return option(default, text, panel, *names, show_default=True, **more)


def unused(beside: str, options: dict[str, Any]) -> None:
    """Refuse options that were given and would have no effect ``beside`` another."""
    names = [name for name, value in options.items() if value is not None]
    if names:
        raise ConfigError(f"{beside} leaves nothing for {' and '.join(names)}: leave one out")


@dataclass(frozen=True, kw_only=True)
class Reported:
    """What a training says, and to whom."""

    log_every: int = setting(20, "Log every N steps.", OUTPUT, min=1)
    report_to: list[str] | None = setting(
        None, "Report to an integration of transformers: tensorboard, wandb, ...; repeatable.",
        OUTPUT,
    )  # fmt: skip

    def report(self) -> Report:
        """To the terminal, and to those."""
        from ..train.loop import Report

        return Report(note, self.log_every, self.report_to or ())


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """One run at a time in ``folder``, except on Windows; if interrupted, say how to go on."""
    from safetensors import SafetensorError

    from ..train.processes import is_first

    folder.mkdir(parents=True, exist_ok=True)
    opened = None if sys.platform == "win32" else os.open(folder, os.O_RDONLY)
    try:
        if is_first() and opened is not None:
            lock(opened, folder)
        yield
    except KeyboardInterrupt:
        note(f"stopped; to go on: {shlex.join(['dllm', *sys.argv[1:]])}")
        raise
    except (OSError, SafetensorError) as error:  # the latter has its number in its words
        if not any(getattr(error, "errno", 0) == n or f"os error {n})" in str(error) for n in FULL):
            raise
        raise DllmError(f"no room is left in {folder}: make some, and the same command goes on "
                        f"({error!s:.80})") from error  # fmt: skip
    finally:
        if opened is not None:
            os.close(opened)


@dataclass(frozen=True, kw_only=True)
class DFlash(Reported):
    """Options of ``dllm train dflash``."""

    verifier: str = setting(..., "Verifier: hub id or folder of a causal model.", SHAPE)
    output: Path = setting(Path("runs/dflash"), "Folder of the run.", OUTPUT)
    data: list[Path] | None = setting(
        None, 'JSON lines: {"ids", "answer"}, or {"prompt"} or {"messages"} that the verifier '
        "answers; repeatable (default: it writes prompts itself).", DATA,
    )  # fmt: skip
    answers: int | None = setting(
        None, "Answers to prompts that the verifier writes, default 6000.", DATA, min=1
    )
    max_new_tokens: int | None = setting(
        None, "Maximum length of an answer in tokens, default 200.", DATA, min=8
    )
    online_hidden_states: bool = setting(
        False, "Compute the verifier's hidden states in every step instead of storing them.", DATA
    )
    layers: int = setting(4, "Layers of the drafter.", SHAPE, min=1)
    block_size: int = setting(
        8, "Block size: 1 known token and block_size - 1 drafted ones.", SHAPE, min=2
    )
    target_layer_ids: str | None = setting(
        None, "Hidden-state layers of the verifier to read, e.g. 1,10,18,27.", SHAPE
    )
    mask_token_id: int | None = setting(
        None, "Id of the mask token (default: an unused one).", SHAPE, min=0
    )
    sliding_window: int | None = setting(
        None, "Sliding window of the attention in tokens (default: none).", SHAPE, min=1
    )
    draft_vocabulary: int = setting(
        0, "Size of the draft vocabulary, the most frequent tokens (0: all).", SHAPE, min=0
    )
    init: str | None = setting(
        None, "Initial weights: verifier (its last layers, the default) or random.", SHAPE
    )
    weights_from: str | None = setting(
        None, "Drafter whose weights, head and vocabulary the run starts with.", SHAPE
    )
    steps: int = setting(4000, "Training steps.", TRAINING, min=1)
    rows: int = setting(8, "Answers per batch.", TRAINING, min=1)
    accumulate: int = setting(1, "Batches per step, of all processes.", TRAINING, min=1)
    anchors: int = setting(48, "Blocks per answer and step.", TRAINING, min=1)
    learning_rate: float = setting(1e-3, "Peak learning rate.", TRAINING, min=0.0)
    warmup: int = setting(50, "Warm-up steps.", TRAINING, min=0)
    schedule: str = setting(
        "cosine", "Learning-rate schedule of transformers, e.g. constant_with_warmup.", TRAINING
    )
    loss: str = setting("dpace", "Loss: dpace or decay.", TRAINING)
    gamma: float | None = setting(
        None, "Decay rate for --loss decay, default 4.", TRAINING, min=0.1
    )
    soft: float = setting(0.5, "Weight of distillation (0: labels only).", TRAINING, min=0.0)
    head_rows: int = setting(6144, "Vocabulary rows used in the loss per step.", TRAINING, min=1)
    markov_rank: int = setting(0, "Rank of the Markov head (0: no head).", SHAPE, min=0)
    evaluate_every: int = setting(200, "Evaluate every N steps.", TRAINING, min=1)
    held_out: int = setting(64, "Hold out one prompt in N for evaluation.", DATA, min=2)
    device: str = setting("cpu", "Device: cpu, cuda, ...", TRAINING)
    seed: int = setting(0, "Random seed.", TRAINING, min=0)


@takes(DFlash)
def dflash(*, options: DFlash) -> None:
    """Train a drafter that fills a block of masks in one forward pass (DFlash).

    A run that was stopped goes on from its last checkpoint.  On several GPUs: `accelerate launch
    --module dllm train dflash --accumulate N ...`, N a multiple of their number.
    """
    from ..drafting.naming import load_verifier
    from ..train.dflash.objective import Objective
    from ..train.dflash.recipe import DFlashTraining, Schedule

    o, report = options, options.report()
    if o.data:
        unused("--data", {"--answers": o.answers})
    if o.weights_from is not None:
        unused("--weights-from", {"--init": o.init})
    if o.loss != "decay":
        unused(f"--loss {o.loss}", {"--gamma": o.gamma})
    recipe = DFlashTraining(
        o.layers, _numbers(o.target_layer_ids), o.block_size, o.mask_token_id, o.sliding_window,
        o.init or "verifier", o.held_out, draft_vocabulary=o.draft_vocabulary,
        weights_from=o.weights_from,
        objective=Objective(o.loss, o.gamma or 4.0, o.soft, o.head_rows, markov=o.markov_rank),
        schedule=Schedule(o.steps, o.learning_rate, o.warmup, o.schedule, o.evaluate_every,
                          accumulate=o.accumulate, seed=o.seed, rows=o.rows, anchors=o.anchors),
    )  # fmt: skip
    model = load_verifier(loaded(o.verifier, o.device))
    with resumable(o.output):
        _train(model, recipe, options, report)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"target_layer_ids are layer numbers, e.g. 1,10,18,27, not {text!r}"
        ) from error


def loaded(name: str, device: str) -> DiffusionModel:
    """The model, in bfloat16 where the machine multiplies it fast."""
    from ..models import load
    from ..train.loop import machine_has_bf16
    from ..train.processes import own_device

    dtype = "bfloat16" if machine_has_bf16(device) else "float32"
    note(f"{name} in {dtype}")
    return load(name, dtype=dtype, device=own_device(device))


def answer_files(model: DiffusionModel, options: DFlash) -> Iterator[tuple[Path, Any]]:
    """Files of answers, and the prompts of those that have to be written."""
    from ..train.dflash.generate import read_data

    for number, file in enumerate(options.data or ()):
        prompts = read_data(model, file)
        yield (file if prompts is None else options.output / f"answers-{number}.jsonl"), prompts


def _train(model: DiffusionModel, recipe: DFlashTraining, options: DFlash, report: Report) -> None:
    from ..train.dflash.generate import STARTERS, write_answers
    from ..train.dflash.recipe import begun, finish, keep_states, start
    from ..train.loop import RECIPE, machine_has_bf16, resume, same_recipe
    from ..train.processes import by_the_first, is_first

    config, folder = begun(model, recipe).blocks.drafter.config, options.output
    if (folder / RECIPE).exists():  # what belongs to another run is not written on
        same_recipe(folder, recipe, model.name)
    files = dict(answer_files(model, options)) or {folder / "answers.jsonl": None}
    if options.data and not any(files.values()):
        unused("--data with answers", {"--max-new-tokens": options.max_new_tokens})
    for file, prompts in files.items():
        if prompts is None and options.data:
            continue
        total = options.answers or 6000 if prompts is None else len(prompts)
        writing = write_answers(
            model, file, total, seed=options.seed, prompts=prompts,
            max_new_tokens=options.max_new_tokens or 200, starters=STARTERS,
        )  # fmt: skip
        for done in by_the_first(writing, options.device):
            note(f"{done}/{total} answers")
    if not options.online_hidden_states:
        for done in by_the_first(keep_states([*files], model.hf, config), options.device):
            if done % 512 == 0:
                note(f"hidden states of {done} answers")
    run, split = start(
        model, [*files], recipe, folder, bf16=machine_has_bf16(model.device.type), report=report
    )
    note(f"{len(split.train)} answers to train on, {len(split.held)} to measure with")
    resume(run)
    if is_first():
        finish(run, model, recipe, split, folder / "drafter")
        note(f"drafter: {folder / 'drafter'}")
