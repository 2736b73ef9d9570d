"""DEER's two-stage alignment of a diffusion drafter with an autoregressive verifier.

DEER: Draft with Diffusion, Verify with Autoregressive Models, arXiv 2512.15176.  The verifier
writes answers; the drafter learns to continue them in one step.  Stage 1 masks the tail of an
answer that was cut at a random place and appends an end marker, which tells a bidirectional model
that the text goes on.  Stage 2 masks the last R tokens, and weighs the first of them most.

Reconstructed, because the paper leaves it open: the marker stands behind the masks; windows may
reach beyond the end of an answer, as they do when drafting, and nothing is learnt from there.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from ...core.errors import ConfigError
from ...models import DiffusionModel
from ..batches import padded
from ..loop import SILENT, Report, Schedule, loop, resume, same_answers, same_recipe
from ..network import Network, check_trainable
from ..processes import world
from ..trajectories import Question, read_trajectories, write_answers

Pair = tuple[list[int], list[int]]  # prompt ids, answer ids with the end token


@dataclass(frozen=True)
class Alignment:
    """Everything that determines a run.  ``window``: masks when drafting; ``far``: largest R of
    stage 2 (96 in the paper); ``alpha``: weight of a token relative to the next one.  Learning
    rates and steps are for small models; the paper takes 1e-4, then 5e-5, for 0.5 B parameters."""

    stage1_steps: int = 400
    stage2_steps: int = 200
    stage1_lr: float = 3e-4
    stage2_lr: float = 1e-4
    rows: int = 24  # sequences per step
    window: int = 16
    far: int = 16
    alpha: float = 1.01
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.rows, self.window, self.far) < 1 or self.alpha < 1:
            raise ConfigError("rows, window, far and alpha must be at least 1")

    def marker_for(self, model: DiffusionModel) -> int:
        """The id of the end marker: a spare row of the vocabulary, else its last token."""
        last = model.facts.vocab_size - 1
        if model.tokenizer is None:
            return last
        return min(1 + max(model.tokenizer.get_vocab().values()), last)


def teacher_answers(
    verifier: DiffusionModel, questions: Sequence[Question], file: Path, max_new_tokens: int = 64,
    say: Callable[[str], None] | None = None,
) -> list[Pair]:  # fmt: skip
    """What the verifier answers, greedily, kept in ``file``, with which a stopped run goes on."""
    if verifier.facts.eos_token_id is None:
        raise ConfigError(f"{verifier.name} has no end token: answers cannot be delimited")
    for done in write_answers(verifier, questions, file, length=max_new_tokens):
        if say is not None:
            say(f"{done}/{len(questions)} answers of {verifier.name}")
    return [([*t.ids[: t.start]], [*t.ids[t.start :]]) for t in read_trajectories(file)]


@dataclass(frozen=True)
class Example:
    """Ids with masks and the marker, targets (-100 where there is no loss), weights."""

    ids: list[int]
    targets: list[int]
    weights: list[float]


def stage1_example(
    pair: Pair, recipe: Alignment, rng: random.Random, mask: int, marker: int
) -> Example:
    """The answer cut at a random place, a random share of its tail masked."""
    cut, least = _cut(pair, recipe.window, rng)
    masked = rng.randint(least, min(cut, 2 * recipe.window))
    return _example(pair, cut, [1.0] * masked, mask, marker)


def stage2_example(
    pair: Pair, recipe: Alignment, rng: random.Random, mask: int, marker: int
) -> Example:
    """The last R tokens masked; token i of them weighs alpha to the power R - i."""
    cut, least = _cut(pair, recipe.far, rng)
    masked = rng.randint(least, min(cut, recipe.far))
    weights = [recipe.alpha ** (masked - i) for i in range(1, masked + 1)]
    return _example(pair, cut, weights, mask, marker)


def _cut(pair: Pair, reach: int, rng: random.Random) -> tuple[int, int]:
    """Where the masks end, at most ``reach`` - 1 tokens beyond the answer, as they do when
    drafting; and how many of them it takes to hide at least the answer's last token."""
    answer = pair[1]
    cut = rng.randint(1, len(answer) + reach - 1)
    return cut, max(1, cut - len(answer) + 1)


def _example(pair: Pair, cut: int, weights: list[float], mask: int, marker: int) -> Example:
    """Nothing is learnt from what follows the end of the answer: no draft gets that far."""
    prompt, answer = pair
    seen, masked = len(prompt) + cut - len(weights), len(weights)
    counted = len(prompt) + len(answer) - seen
    weights = [*weights[:counted], *[0.0] * (masked - counted)]
    total = sum(weights)
    text = [*prompt, *answer][: seen + masked]
    targets = [*text[seen:], *[-100] * (seen + masked - len(text))]
    ids = [*text[:seen], *[mask] * masked, marker]
    result = [*[-100] * seen, *targets, -100]
    return Example(ids, result, [*[0.0] * seen, *(w / total for w in weights), 0.0])


def begin(drafter: DiffusionModel, recipe: Alignment, folder: Path, verifier: str = "") -> None:
    """Raise `ConfigError` for what cannot be aligned, or where ``folder`` holds another run, and
    note there what determines this one; ``verifier``: the name of what wrote the answers."""
    check_trainable(drafter, 1)
    if world() > 1:
        raise ConfigError("deer trains in one process: start it without torchrun or accelerate")
    same_recipe(folder, recipe, f"{drafter.name} for {verifier}" if verifier else drafter.name)


def align(
    drafter: DiffusionModel, pairs: Sequence[Pair], recipe: Alignment, folder: Path,
    report: Report = SILENT, verifier: str = "",
) -> Iterator[DiffusionModel]:  # fmt: skip
    """Both stages on ``pairs``, in ``folder``, where a stopped run goes on; yields the model after
    each.  ``drafter`` itself is not changed."""
    begin(drafter, recipe, folder, verifier)
    same_answers(folder / "checkpoints1", pairs)
    network = Network(drafter)
    mask, marker = network.mask_id, recipe.marker_for(drafter)
    defaults = {**drafter.generation_defaults, "end_marker": marker}
    aligned = replace(network.snapshot(), generation_defaults=defaults)
    stages = ((recipe.stage1_steps, recipe.stage1_lr, stage1_example),
              (recipe.stage2_steps, recipe.stage2_lr, stage2_example))  # fmt: skip
    for number, (steps, peak, make) in enumerate(stages, 1):
        examples = Examples(pairs, recipe, steps, make, mask, marker, drafter.facts.context_length)
        schedule = Schedule(steps, peak, min(20, steps // 2), "linear", 0, seed=recipe.seed)
        resume(loop(Weighted(network), examples, schedule, folder / f"checkpoints{number}",
                    device=str(drafter.device), report=report))  # fmt: skip
        network.hf.train(False)
        yield aligned


class Examples(Dataset[dict[str, torch.Tensor]]):
    """Batch ``i`` of a stage: ``rows`` examples of random pairs, padded on the right."""

    def __init__(
        self, pairs: Sequence[Pair], recipe: Alignment, steps: int, make: Any, mask: int,
        marker: int, room: int,
    ) -> None:  # fmt: skip
        self.pairs, self.recipe, self.steps, self.make = pairs, recipe, steps, make
        self.mask, self.marker, self.room = mask, marker, room

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = random.Random(f"{self.recipe.seed}/{self.make.__name__}/{index}")
        chosen = rng.choices(self.pairs, k=self.recipe.rows)
        made = [self.make(pair, self.recipe, rng, self.mask, self.marker) for pair in chosen]
        examples = [e for e in made if len(e.ids) <= self.room] or made[:1]
        return {
            "ids": padded(e.ids for e in examples),
            "valid": padded([True] * len(e.ids) for e in examples),
            "targets": padded((e.targets for e in examples), -100),
            "weights": padded(e.weights for e in examples),
        }


class Weighted(nn.Module):
    """Weighted cross-entropy of ``targets`` (B, L), mean over the rows."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, ids: torch.Tensor, valid: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """``loss`` of a batch."""
        logits = self.network.logits(ids, valid)
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return {"loss": (losses * weights).sum() / len(ids)}


def save_aligned(model: DiffusionModel, recipe: Alignment, folder: Path) -> None:
    """Write an aligned drafter; `dllm.load` reads it, drafting finds its end marker."""
    model.save_pretrained(folder)
    (folder / "alignment.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n")
