"""DEER's two-stage alignment of a diffusion drafter with an autoregressive verifier.

DEER: Draft with Diffusion, Verify with Autoregressive Models, arXiv 2512.15176.  The verifier
writes answers; the drafter learns to continue them in one step.  Stage 1 masks the tail of an
answer that was cut at a random place and appends an end marker, which tells a bidirectional model
that the text goes on.  Stage 2 masks the last R tokens only and weighs those next to the visible
text most.

Reconstructed, because the paper leaves it open: the marker stands behind the masks (or before
them: ``marker_position="before_masks"``); windows may reach beyond the end of an answer, as they do
when drafting, and nothing is learnt from there.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..drafting.drafters.diffusion import MARKER_POSITIONS
from ..errors import ConfigError, UnknownNameError
from ..eval.tasks import TASKS
from ..models import DiffusionModel
from ..prompts import encode

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
    end_marker: int | None = None  # default: a spare row of the vocabulary, else the last token
    marker_position: str = MARKER_POSITIONS[0]
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.rows, self.window, self.far) < 1 or self.alpha < 1:
            raise ConfigError("rows, window, far and alpha must be at least 1")
        if self.marker_position not in MARKER_POSITIONS:
            raise UnknownNameError("marker position", self.marker_position, MARKER_POSITIONS)

    def marker_for(self, model: DiffusionModel) -> int:
        """The id of the end marker: one that no text contains."""
        if self.end_marker is not None:
            return self.end_marker
        known = len(model.tokenizer) if model.tokenizer is not None else model.facts.vocab_size
        return min(known, model.facts.vocab_size - 1)


@torch.inference_mode()
def teacher_answers(
    verifier: DiffusionModel, prompts: Sequence[Any], max_new_tokens: int = 64, rows: int = 32
) -> list[Pair]:
    """What the verifier answers, greedily, in batches padded on the left."""
    end = verifier.facts.eos_token_id
    if end is None:
        raise ConfigError(f"{verifier.name} has no end token: answers cannot be delimited")
    ids = sorted((encode(verifier, prompt).tolist() for prompt in prompts), key=len)
    hf: Any = verifier.hf
    pairs: list[Pair] = []
    for first in range(0, len(ids), rows):
        batch = ids[first : first + rows]
        longest = max(map(len, batch))
        padded = torch.tensor([[end] * (longest - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
        out = hf.generate(
            padded.to(hf.device), attention_mask=mask.to(hf.device), do_sample=False,
            max_new_tokens=max_new_tokens, pad_token_id=end,
        )  # fmt: skip
        for prompt, row in zip(batch, out[:, longest:].tolist(), strict=True):
            answer = row[: row.index(end) + 1] if end in row else row
            pairs.append((prompt, answer))
    return pairs


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
    return _example(pair, cut, [1.0] * masked, recipe, mask, marker)


def stage2_example(
    pair: Pair, recipe: Alignment, rng: random.Random, mask: int, marker: int
) -> Example:
    """The last R tokens masked; token i of them weighs alpha to the power R - i."""
    cut, least = _cut(pair, recipe.far, rng)
    masked = rng.randint(least, min(cut, recipe.far))
    weights = [recipe.alpha ** (masked - i) for i in range(1, masked + 1)]
    return _example(pair, cut, weights, recipe, mask, marker)


def _cut(pair: Pair, reach: int, rng: random.Random) -> tuple[int, int]:
    """Where the masks end, at most ``reach`` - 1 tokens beyond the answer, as they do when
    drafting; and how many of them it takes to hide at least the answer's last token."""
    answer = pair[1]
    cut = rng.randint(1, len(answer) + reach - 1)
    return cut, max(1, cut - len(answer) + 1)


def _example(
    pair: Pair, cut: int, weights: list[float], recipe: Alignment, mask: int, marker: int
) -> Example:
    """Nothing is learnt from what follows the end of the answer: no draft gets that far."""
    prompt, answer = pair
    seen, masked = len(prompt) + cut - len(weights), len(weights)
    counted = len(prompt) + len(answer) - seen
    weights = [*weights[:counted], *[0.0] * (masked - counted)]
    total = sum(weights)
    text = [*prompt, *answer][: seen + masked]
    targets = [*text[seen:], *[-100] * (seen + masked - len(text))]
    at = seen if recipe.marker_position == "before_masks" else seen + masked
    ids = [*text[:seen], *[mask] * masked]
    result = [*[-100] * seen, *targets]
    share = [*[0.0] * seen, *(w / total for w in weights)]
    return Example(
        [*ids[:at], marker, *ids[at:]],
        [*result[:at], -100, *result[at:]],
        [*share[:at], 0.0, *share[at:]],
    )


def loss_of(hf: Any, examples: Sequence[Example], shift: int) -> torch.Tensor:
    """Weighted cross-entropy of the masked positions, mean over the examples."""
    longest = max(len(e.ids) for e in examples)

    def pad(rows: list[list[Any]], value: Any) -> torch.Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows]).to(hf.device)

    targets = pad([e.targets for e in examples], -100)
    logits = hf(
        input_ids=pad([e.ids for e in examples], 0),
        attention_mask=pad([[1] * len(e.ids) for e in examples], 0),
        use_cache=False,
    ).logits
    if shift:
        logits = F.pad(logits, (0, 0, shift, 0))[:, : logits.shape[1]]
    losses = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
    return (losses * pad([e.weights for e in examples], 0.0)).sum() / len(examples)


def align(
    drafter: DiffusionModel, pairs: Sequence[Pair], recipe: Alignment, log_every: int = 50
) -> Iterator[tuple[dict[str, Any], DiffusionModel]]:
    """Both stages on ``pairs``.

    Yields every ``log_every`` steps, and at the end of each stage (``"done": True``), an entry with
    stage, step, mean loss and seconds, and the model so far.  ``drafter`` itself is not changed.
    """
    facts = drafter.facts
    mask, marker = facts.mask_token_id, recipe.marker_for(drafter)
    if mask is None:
        raise ConfigError(
            f"{drafter.name} has no mask token: only a diffusion model can be aligned"
        )
    hf: Any = copy.deepcopy(drafter.hf)
    hf.float().requires_grad_(True)
    where = {"end_marker": marker, "marker_position": recipe.marker_position}
    defaults = {**drafter.generation_defaults, **where}
    aligned = replace(drafter, hf=hf, generation_defaults=defaults)
    rng = random.Random(recipe.seed)
    stages = ((1, recipe.stage1_steps, recipe.stage1_lr, stage1_example),
              (2, recipe.stage2_steps, recipe.stage2_lr, stage2_example))  # fmt: skip
    for stage, steps, peak, make in stages:
        optimizer = torch.optim.AdamW(hf.parameters(), lr=peak, weight_decay=0.0)
        clock, total, since = time.perf_counter(), 0.0, 0
        for step in range(steps):
            chosen = rng.choices(pairs, k=recipe.rows)
            examples = [make(pair, recipe, rng, mask, marker) for pair in chosen]
            room = facts.context_length
            examples = [e for e in examples if len(e.ids) <= room] or examples[:1]
            loss = loss_of(hf, examples, facts.logit_shift)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
            share = min(1.0, (step + 1) / 20, 1.2 * (1 - step / steps))
            for group in optimizer.param_groups:
                group["lr"] = peak * share
            optimizer.step()
            optimizer.zero_grad()
            total, since = total + loss.item(), since + 1
            done = step + 1 == steps
            if done or (step + 1) % log_every == 0:
                seconds = time.perf_counter() - clock
                entry = {"stage": stage, "step": step + 1, "loss": total / since,
                         "seconds": seconds, "done": done}  # fmt: skip
                yield entry, aligned
                clock, total, since = time.perf_counter(), 0.0, 0


def save_aligned(model: DiffusionModel, recipe: Alignment, folder: Path) -> None:
    """Write an aligned drafter; `dllm.load` reads it, drafting finds its end marker."""
    model.save_pretrained(folder)
    (folder / "alignment.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n")


def task_prompts(count: int, seed: int = 0) -> list[str]:
    """Training prompts of the generated tasks, all of them equally often."""
    rng = random.Random(f"deer/{seed}")
    return [TASKS[name].sample(rng, "train").prompt for name in rng.choices(list(TASKS), k=count)]
