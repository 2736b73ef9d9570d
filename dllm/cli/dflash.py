"""``dllm train dflash``: a block-diffusion drafter for any causal model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import ConfigError, UnknownNameError
from .output import note

if TYPE_CHECKING:
    from ..models import DiffusionModel
    from ..train.dflash.recipe import DFlashTraining

DATA, SHAPE, TRAINING, OUTPUT = "Data", "Drafter", "Training", "Output"


def setting(text: str, panel: str, *names: str, **more: Any) -> Any:
    """A typer option of a training under a heading of the help page, with its default."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def dflash(
    verifier: Annotated[str, setting("Hub id or folder of a causal model.", SHAPE, "--verifier")],
    output: Annotated[
        Path, setting("Folder of the run.", OUTPUT, "--output", "-o")
    ] = Path("runs/dflash"),
    data: Annotated[
        list[Path] | None,
        setting(
            'JSON lines {"ids", "answer"}, or {"prompt"} or {"messages"} for the verifier to '
            "answer; repeatable; default: it prompts itself.", DATA,
        ),
    ] = None,
    answers: Annotated[int, setting("Answers to prompts of its own.", DATA, min=1)] = 6000,
    max_new_tokens: Annotated[int, setting("Longest answer that fits.", DATA, min=8)] = 200,
    online_hidden_states: Annotated[
        bool, setting("Compute hidden states in every step instead of keeping them.", DATA)
    ] = False,
    layers: Annotated[int, setting("Layers of the drafter.", SHAPE, min=1)] = 4,
    block_size: Annotated[int, setting("Anchor and drafts.", SHAPE, min=2)] = 8,
    target_layer_ids: Annotated[
        str | None,
        setting("Layers of the verifier whose hidden states it reads, e.g. 1,10,18,27.", SHAPE),
    ] = None,
    mask_token_id: Annotated[int | None, setting("Default: an id to spare.", SHAPE, min=0)] = None,
    sliding_window: Annotated[int | None, setting("Default: none.", SHAPE, min=1)] = None,
    draft_vocabulary: Annotated[
        int, setting("Ids that it drafts, the most frequent ones; 0: all.", SHAPE, min=0)
    ] = 0,
    init: Annotated[str, setting("'verifier' (its last layers) or 'random'.", SHAPE)] = "verifier",
    weights_from: Annotated[
        str | None, setting("A drafter to go on from, its head and ids included.", SHAPE)
    ] = None,
    steps: Annotated[int, setting("Steps in all.", TRAINING, min=1)] = 4000,
    rows: Annotated[int, setting("Answers per step and process.", TRAINING, min=1)] = 8,
    anchors: Annotated[int, setting("Blocks per answer and step.", TRAINING, min=1)] = 48,
    learning_rate: Annotated[float, setting("Peak.", TRAINING, min=0.0)] = 1e-3,
    warmup: Annotated[int, setting("Steps.", TRAINING, min=0)] = 50,
    schedule: Annotated[
        str, setting("cosine, constant_with_warmup, ... of transformers.", TRAINING)
    ] = "cosine",
    loss: Annotated[str, setting("'dpace' or 'decay'.", TRAINING)] = "dpace",
    gamma: Annotated[float, setting("Of 'decay'.", TRAINING, min=0.1)] = 4.0,
    soft: Annotated[
        float, setting("Share of the verifier's distribution in the target.", TRAINING, min=0.0)
    ] = 0.5,
    head_rows: Annotated[int, setting("Tokens in a step's head.", TRAINING, min=1)] = 6144,
    markov_rank: Annotated[
        int, setting("Of a Markov head that is trained beside the drafter; 0: none.", SHAPE, min=0)
    ] = 0,
    selector_rank: Annotated[
        int, setting("Of DFlash 2's selector instead of a Markov head; 0: none.", SHAPE, min=0)
    ] = 0,
    selector: Annotated[
        bool, setting("DFlash 2's selector, of rank 256.", SHAPE, "--selector")
    ] = False,
    conv: Annotated[
        bool, setting("DFlash 2's convolutions around every sublayer.", SHAPE, "--conv")
    ] = False,
    from_anchor: Annotated[
        bool, setting("The row of the last token drafts as well.", SHAPE, "--from-anchor")
    ] = False,
    evaluate_every: Annotated[int, setting("Steps.", TRAINING, min=1)] = 200,
    held_out: Annotated[int, setting("One prompt in so many.", DATA, min=2)] = 64,
    device: Annotated[str, setting("cpu, cuda, ...", TRAINING)] = "cpu",
    seed: Annotated[int, setting("Of prompts, weights and batches.", TRAINING, min=0)] = 0,
    into: Annotated[
        str, setting("Format: native (transformers) or speculators (vLLM).", OUTPUT, "--format")
    ] = "native",
    dry_run: Annotated[
        bool, setting("Only say what a step would take.", OUTPUT, "--dry-run")
    ] = False,
) -> None:  # fmt: skip
    """Train a drafter that fills a block of masks in one forward (DFlash).

    A run that was stopped goes on where it saved last.  On several GPUs: write the data with one
    process first, then `accelerate launch --module dllm train dflash ...`.
    """

    from ..drafting.naming import load_verifier
    from ..train.dflash.export import FORMATS
    from ..train.dflash.objective import Objective
    from ..train.dflash.recipe import DFlashTraining, Schedule

    if into not in FORMATS:
        raise UnknownNameError("format", into, FORMATS)
    recipe = DFlashTraining(
        layers, _numbers(target_layer_ids), block_size, mask_token_id, sliding_window, init,
        held_out, draft_vocabulary=draft_vocabulary, conv=conv, from_anchor=from_anchor,
        objective=Objective(loss, gamma, soft, head_rows, markov=markov_rank,
                            selector=selector_rank or (256 if selector else 0)),
        schedule=Schedule(steps, learning_rate, warmup, schedule, evaluate_every, seed=seed,
                          rows=rows, anchors=anchors),
    )  # fmt: skip
    if dry_run:
        return _dry_run(verifier, recipe)
    model = load_verifier(loaded(verifier, device))
    output.mkdir(parents=True, exist_ok=True)
    files = written_answers(model, data or [], output, answers, max_new_tokens, seed)
    _train(model, files, recipe, output, weights_from, online_hidden_states, into)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"target_layer_ids are layer numbers, e.g. 1,10,18,27, not {text!r}"
        ) from error


def _dry_run(verifier: str, recipe: DFlashTraining) -> None:
    from ..models.checkpoint import open_checkpoint
    from ..models.reading import family_of, native_config
    from ..train.dflash.recipe import dry_run

    checkpoint = open_checkpoint(verifier)
    config, _ = native_config(checkpoint, family_of(checkpoint))
    for name, value in dry_run(config, recipe).items():
        note(f"{name} {value:.1f}")


def loaded(name: str, device: str, dtype: str = "auto") -> DiffusionModel:
    """The model, by default in bfloat16 where the machine multiplies it fast."""
    from ..models import load
    from ..train.loop import machine_has_bf16

    if dtype == "auto":
        dtype = "bfloat16" if machine_has_bf16(device) else "float32"
    note(f"{name} in {dtype}")
    return load(name, dtype=dtype, device=device)


def written_answers(
    model: DiffusionModel, data: list[Path], output: Path, count: int, most: int, seed: int,
    lines: list[str] | None = None,
) -> list[Path]:  # fmt: skip
    """Files of answers, written first where there are only prompts: files of ``data``, ``lines``,
    or else those that the model makes up."""
    from ..request.prompts import encode
    from ..train.dflash.generate import STARTERS, read_data, write_answers

    asked: dict[Path, Any] = {}
    files = []
    for i, file in enumerate(data):
        prompts = read_data(model, file)
        files.append(file if prompts is None else output / f"answers-{i}.jsonl")
        asked[files[-1]] = prompts
    if not data:
        files = [output / "answers.jsonl"]
        if lines is not None:
            asked[files[0]] = [encode(model, line) for line in lines]
    for file in files:
        prompts = asked.get(file)
        if prompts is None and data:
            continue
        total = count if prompts is None else len(prompts)
        for done in write_answers(
            model, file, total, seed=seed, prompts=prompts, max_new_tokens=most, starters=STARTERS
        ):
            note(f"{done}/{total} answers")
    return files


def _train(
    model: DiffusionModel, files: list[Path], recipe: DFlashTraining, output: Path,
    weights_from: str | None, online: bool, into: str,
) -> None:  # fmt: skip
    from ..train.dflash.recipe import finish, keep_states, mask_id, start
    from ..train.loop import machine_has_bf16, resume

    if not online:
        mask = mask_id(model) if recipe.mask_token_id is None else recipe.mask_token_id
        for done in keep_states(files, model.hf, recipe.config(model.hf.config, mask)):
            if done % 512 == 0:
                note(f"hidden states of {done} answers")
    run, split = start(
        model, files, recipe, output, bf16=machine_has_bf16(model.device.type),
        weights_from=weights_from, say=note,
    )  # fmt: skip
    note(f"{len(split.train)} answers to train on, {len(split.held)} to measure with")
    resume(run)
    if int(os.environ.get("RANK", "0")) == 0:
        finish(run, model, recipe, split, output / "drafter", into, weights_from)
        note(f"drafter: {output / 'drafter'}")
