"""Recipe of Learn2PD's filter: which proposals of a block are already final?

A model decodes prompts one token per step.  At every step the filter sees the probabilities of the
likeliest tokens of the block; a position's label is whether its proposal is the token that ends
up there (Learning to Parallel, arXiv 2509.25188).  The perceptron has one hidden layer of 64 units;
that width is this library's choice, the published one is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from ...api import generate
from ...core.canvas import BoolArray, Canvas, FloatArray, IntArray
from ...models import DiffusionModel
from ...samplers import Reads, Selector, View
from ...samplers.base import top
from ..loop import Report, Schedule, loop, resume

HIDDEN = 64


@dataclass(frozen=True)
class Recorder(Selector):
    """One token per step, while keeping what the filter would have seen."""

    name = "recorder"
    statistics: ClassVar = {"max_logprob": 1}

    seen: list[tuple[Canvas, int, FloatArray, IntArray]] = field(default_factory=list)

    def reads(self, canvas: Canvas) -> Reads:
        return Reads(np.arange(*canvas.window))

    def select(self, view: View) -> BoolArray:
        low, high = view.canvas.window
        whole = view.all_predictions
        here = (whole.positions >= low) & (whole.positions < high)
        assert whole.max_logprob is not None
        confidence, token = np.exp(whole.max_logprob[here]), whole.token[here]
        self.seen.append((view.canvas, low, confidence, token))
        return top(view.score, 1)


def trajectories(
    model: DiffusionModel, prompts: Sequence[str], block_length: int = 32, batch: int = 32
) -> tuple[FloatArray, FloatArray, BoolArray]:
    """Confidences (n, K) float32, labels (n, K) float32 and (n, K) bool where a label counts."""
    recorder = Recorder()
    for i in range(0, len(prompts), batch):
        generate(model, list(prompts[i : i + batch]), sampler=recorder, block_length=block_length)
    n = len(recorder.seen)
    confidence = np.ones((n, block_length), np.float32)
    label = np.ones((n, block_length), np.float32)
    counts = np.zeros((n, block_length), np.bool_)
    for row, (canvas, low, result, token) in enumerate(recorder.seen):
        final = canvas.tokens[low : low + len(result)]
        confidence[row, : len(result)] = result
        label[row, : len(final)] = token[: len(final)] == final
        counts[row, : len(final)] = True
    return confidence, label, counts


class Judge(nn.Module):
    """Mean binary cross-entropy of the positions that count."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(
        self, confidence: torch.Tensor, label: torch.Tensor, counts: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """``loss`` of a batch, (n, K) each."""
        loss = nn.functional.binary_cross_entropy_with_logits(
            self.net(confidence), label, weight=counts
        )
        return {"loss": loss * counts.numel() / counts.sum()}


def train_filter(
    confidence: FloatArray,
    label: FloatArray,
    counts: BoolArray,
    steps: int = 1_500,
    lr: float = 3e-3,
    seed: int = 0,
) -> tuple[dict[str, FloatArray], dict[str, float]]:
    """Weights (``w1`` (K, 64), ``b1``, ``w2`` (64, K), ``b2``) and what was measured.

    AdamW on whole batches of binary cross-entropy; a tenth of the steps is held out.  Returns the
    held-out ``loss``, and ``precision`` and ``recall`` at the probability 0.96.
    """
    torch.manual_seed(seed)
    size = confidence.shape[1]
    order = torch.randperm(len(confidence))
    held, kept = order[: len(order) // 10], order[len(order) // 10 :]
    x, y, m = (torch.from_numpy(a) for a in (confidence, label, counts.astype(np.float32)))
    net = nn.Sequential(nn.Linear(size, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, size))
    objective = Judge(net)
    batches = [{"confidence": x[kept], "label": y[kept], "counts": m[kept]}] * steps
    schedule = Schedule(steps, lr, 0, "constant", 0, save_every=steps, clip=0.0,
                        weight_decay=0.01, seed=seed)  # fmt: skip
    with TemporaryDirectory() as folder:
        resume(loop(objective, batches, schedule, Path(folder), report=Report(log_every=steps)))
    with torch.no_grad():
        called = (net(x[held]).sigmoid() > 0.96) & (m[held] > 0)
        true = (y[held] > 0) & (m[held] > 0)
        both = float((called & true).sum())
        measured = {
            "loss": float(objective(x[held], y[held], m[held])["loss"]),
            "precision": both / max(1.0, float(called.sum())),
            "recall": both / max(1.0, float(true.sum())),
        }
    parameters = dict(net.named_parameters())
    names = {"w1": "0.weight", "b1": "0.bias", "w2": "2.weight", "b2": "2.bias"}
    weights = {new: parameters[old].detach().numpy().T.copy() for new, old in names.items()}
    return weights, measured


def save_filter(weights: dict[str, FloatArray], path: Path) -> None:
    """Write what ``learn2pd(filter=...)`` reads."""
    halves: Any = {name: array.astype(np.float16) for name, array in weights.items()}
    np.savez_compressed(path, **halves)
