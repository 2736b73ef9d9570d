"""A whole run: answers, hidden states, training, a folder with a card."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from ...core.errors import ConfigError
from ...drafting.dflash.checkpoint import BlockCheckpoint, load_checkpoint
from ...drafting.dflash.config import DFLASH
from ...models import DiffusionModel
from ..loop import SILENT, Loop, Report, loop, same_answers, same_recipe
from ..loop import Schedule as LoopSchedule
from .card import card, curve
from .data import Answer, Batches, HiddenStates, common_tokens, loops, read_answers, write_states
from .evaluate import measure
from .export import export
from .model import copy_layers, drafter_config, new_drafter
from .objective import Objective, Reader, Trainee

INITS = ("verifier", "random")
SHORTEST = 8  # answer tokens


@dataclass(frozen=True)
class Schedule(LoopSchedule):
    """A schedule of ``rows`` answers with ``anchors`` blocks each per step."""

    rows: int = 8
    anchors: int = 48
    weight_decay: float = 0.01


@dataclass(frozen=True)
class DFlashTraining:
    """Everything that determines a run, given the answers.

    ``layers``, ``target_layer_ids`` (None: spread as DFlash does) and ``block_size`` shape it;
    ``mask_token_id``: None chooses one; ``init``: "verifier" starts with copies of its last layers,
    "random" from nothing; ``held_out``: one in so many prompts is never trained on, and
    ``evaluated`` of these answers measure acceptance; ``draft_vocabulary``: ids that the finished
    drafter proposes, the most frequent of the answers (0: all), and those of ``weights_from``, a
    drafter whose weights and head it starts with instead.
    """

    layers: int = 4
    target_layer_ids: tuple[int, ...] | None = None
    block_size: int = 8
    mask_token_id: int | None = None
    sliding_window: int | None = None
    init: str = "verifier"
    held_out: int = 64
    evaluated: int = 48
    draft_vocabulary: int = 0
    weights_from: str | None = None
    objective: Objective = field(default_factory=Objective)
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        if self.init not in INITS:
            raise ConfigError(f"init is 'verifier' or 'random', not {self.init!r}")
        if self.held_out < 2:
            raise ConfigError("hold out one prompt in at least 2")


def mask_id(model: DiffusionModel, given: int | None = None) -> int:
    """The id that is ``given``, or one that no answer contains: the tokenizer's mask, a spare row
    of the vocabulary, or the last special token that the chat template does not use."""
    if given is not None:
        if not 0 <= given < model.facts.vocab_size:
            raise ConfigError(f"mask_token_id {given} is no id of {model.facts.vocab_size} tokens")
        return given
    tokenizer: Any = model.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{model.name} came without a tokenizer: pass mask_token_id")
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    spare: int = 1 + max(tokenizer.get_vocab().values())
    if spare < model.facts.vocab_size:
        return spare
    template = str(tokenizer.chat_template)  # there may be several, by name
    ids = sorted(
        index for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content not in template
        and index not in (*model.facts.stop_token_ids, tokenizer.bos_token_id,
                          tokenizer.pad_token_id, tokenizer.unk_token_id)
    )  # fmt: skip
    if not ids:
        raise ConfigError(f"{model.name} has no id to spare for a mask: pass mask_token_id")
    return int(ids[-1])


@dataclass(frozen=True)
class Split:
    """Answers to train on and answers to measure with; ``dropped`` were too short or loops."""

    train: list[Answer]
    held: list[Answer]
    dropped: int

    @classmethod
    def of(cls, answers: Sequence[Answer], held_out: int, evaluated: int) -> Self:
        good = [a for a in answers if a.tokens >= SHORTEST and not loops(a.ids[a.start :])]
        held = [a for a in good if a.held_out(held_out)]
        train = [a for a in good if not a.held_out(held_out)]
        if not held or not train:
            raise ConfigError(
                f"of {len(answers)} answers {len(train)} are left to train on and {len(held)} to "
                f"measure with: more answers are needed, or another --held-out than {held_out}"
            )
        return cls(train, held[:evaluated], len(answers) - len(good))


def keep_states(files: Sequence[Path], verifier: Any, config: Any) -> Iterator[int]:
    """Compute the hidden states of all ``files`` that lack them."""
    reader = Reader(verifier, config.target_layer_ids)
    for file in files:
        yield from write_states(file, reader, config.target_layer_ids)


def begun(verifier: DiffusionModel, recipe: DFlashTraining) -> Trainee:
    """What a run starts with.  Raises `ConfigError` where no drafter can be trained."""
    hf: Any = verifier.hf
    torch.manual_seed(recipe.schedule.seed)
    drafter = new_drafter(drafter_config(
        hf.config, layers=recipe.layers, target_layer_ids=recipe.target_layer_ids,
        block_size=recipe.block_size, mask_token_id=mask_id(verifier, recipe.mask_token_id),
        sliding_window=recipe.sliding_window,
    ))  # fmt: skip
    if recipe.weights_from is None and recipe.init == "verifier":
        copy_layers(drafter, hf)
    trainee = Trainee(drafter, hf, recipe.objective, torch.arange(0))
    if recipe.weights_from is not None:
        _take_weights(trainee, load_checkpoint(recipe.weights_from))
    return trainee


def start(
    verifier: DiffusionModel, files: Sequence[Path], recipe: DFlashTraining, folder: Path, *,
    bf16: bool, report: Report = SILENT,
) -> tuple[Loop, Split]:  # fmt: skip
    """A run, ready: a checkpoint in ``folder`` is taken up by `resume`."""
    hf: Any = verifier.hf
    hf.eval().requires_grad_(False)
    trainee = begun(verifier, recipe)
    config = trainee.blocks.drafter.config
    layers = list(config.target_layer_ids or [])
    split = Split.of(
        [a for file in files for a in read_answers(file, layers, hf)], recipe.held_out,
        recipe.evaluated,
    )  # fmt: skip
    trainee.common = common_tokens(split.train, recipe.objective.head_rows)
    states = HiddenStates(layers, config.hidden_size)
    schedule = recipe.schedule
    data = Batches(
        split.train, schedule.rows, schedule.anchors, schedule.seed,
        schedule.steps * schedule.accumulate, states,
    )  # fmt: skip
    same_recipe(folder, recipe, verifier.name)
    same_answers(folder / "checkpoints", [(a.ids, a.start) for a in split.train])
    rows = min(schedule.rows, len(split.held))
    held = rows and Batches(split.held, rows, schedule.anchors, schedule.seed,
                            len(split.held) // rows, states)  # fmt: skip
    run = loop(
        trainee, data, schedule, folder / "checkpoints", bf16=bf16,
        device=str(trainee.head.device), report=report, held=held or (),
        measure=partial(measure, answers=split.held, states=states),
    )  # fmt: skip
    return run, split


def _take_weights(trainee: Trainee, checkpoint: BlockCheckpoint) -> None:
    """Start with the weights of a drafter, and of its head where the run trains one like it."""
    drafter = trainee.blocks.drafter
    for name in ("num_hidden_layers", "target_layer_ids", "hidden_size"):
        if getattr(drafter.config, name) != getattr(checkpoint.config, name):
            raise ConfigError(f"{checkpoint.name} has another {name} than this run")
    if checkpoint.variant != DFLASH:
        raise ConfigError(f"{checkpoint.name} has parts beyond DFlash, which are not trained here")
    drafter.load_state_dict({name: t.float() for name, t in checkpoint.weights.items()})
    if trainee.walk is not None:
        own, brought = trainee.walk.state_dict(), checkpoint.markov
        if {k: t.shape for k, t in own.items()} == {k: t.shape for k, t in brought.items()}:
            trainee.walk.load_state_dict({name: t.float() for name, t in brought.items()})


def finish(
    run: Loop, verifier: DiffusionModel, recipe: DFlashTraining, split: Split, folder: Path
) -> None:
    """Write the drafter in bfloat16, with its card."""
    trainee: Any = run.accelerator.unwrap_model(run.model)
    drafter = trainee.blocks.drafter
    count = recipe.draft_vocabulary
    ids = common_tokens(split.train, count) if count else None
    if ids is not None and recipe.weights_from is not None:
        known = load_checkpoint(recipe.weights_from).draft_ids
        ids = None if known is None else torch.unique(torch.cat([ids, known]))
    weights = {name: t.detach().cpu() for name, t in drafter.state_dict().items()}
    head = {} if trainee.walk is None else trainee.walk.state_dict()
    markov = {name: t.detach().cpu() for name, t in head.items()}
    checkpoint = BlockCheckpoint(str(folder), drafter.config, weights, ids, markov=markov)
    export(checkpoint, folder, len(trainee.head))
    settings = {k: v for k, v in asdict(recipe).items() if k not in ("objective", "schedule")}
    settings |= asdict(recipe.objective) | asdict(recipe.schedule)
    settings["mask_token_id"] = drafter.config.mask_token_id
    settings["target_layer_ids"] = list(drafter.config.target_layer_ids)
    facts = {
        "answers": len(split.train), "answer tokens": sum(a.tokens for a in split.train),
        "held-out answers measured": len(split.held), "answers dropped": split.dropped,
        "parameters": sum(t.numel() for t in weights.values()),
    }  # fmt: skip
    shape = recipe.schedule
    points = curve(run.state.log_history, shape.rows * shape.anchors * shape.accumulate)
    text = card(verifier.name, settings, points, facts)
    (folder / "README.md").write_text(text, encoding="utf-8")
