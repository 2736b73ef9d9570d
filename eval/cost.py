"""What decoding a row costs: operations, counted from a model's shape and a trace.

Two operations per multiply-add.  A step that computes q positions, reads S and scores r costs

    products   2 q L (2 d H dh + 2 d Hkv dh + 3 d F)
    attention  4 q S H dh L
    head       2 r d V

What layer-wise caches spend on choosing positions is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..kernels.linear import Packed, linear
from ..runtime.result import Result

Product = Callable[[torch.Tensor], torch.Tensor]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
COLD = 64 * 2**20  # bytes of weights that no processor cache holds


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder with gated feed-forward layers, all alike."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a transformers config."""
        heads = config.num_attention_heads
        return cls(
            config.hidden_size, config.num_hidden_layers, heads,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            config.intermediate_size, config.vocab_size,
        )  # fmt: skip

    @property
    def parameters(self) -> int:
        """All weights but those of norms, embedding and head apart."""
        return self.layers * self.layer + 2 * self.hidden * self.vocabulary

    @property
    def layer(self) -> int:
        """Weights of one layer's matrices."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate


@dataclass(frozen=True)
class StepCost:
    """One forward of one row: positions computed and scored, operations of its three parts."""

    computed: float
    scored: int
    products: float
    attention: float
    head: float

    @property
    def operations(self) -> float:
        return self.products + self.attention + self.head


def step_cost(shape: Shape, computed: float, read: int, scored: int) -> StepCost:
    """The cost of a step that computes, reads and scores that many positions."""
    s = shape
    return StepCost(
        computed,
        scored,
        2 * computed * s.layers * s.layer,
        4 * computed * read * s.heads * s.head_dim * s.layers,
        2 * scored * s.hidden * s.vocabulary,
    )


def costs(shape: Shape, out: Result) -> Iterator[StepCost]:
    """The cost of every step of a traced result; layer-wise caches at their mean over layers."""
    assert out.trace is not None
    steps = out.trace.steps
    fed = sum(step.computed for step in steps)
    for step in steps:
        read = len(out.sequences) if step.read is None else sum(b - a for a, b in step.read)
        scored = len(step.commits) + len(step.drafts)
        yield step_cost(shape, step.computed * out.computed / fed, read, scored)


@dataclass(frozen=True)
class Rates:
    """How fast a device multiplies ``rows`` rows with a model's weights: ``rate`` operations per
    second each.  Few rows are slower per operation, because the weights have to be read."""

    rows: tuple[int, ...]
    rate: tuple[float, ...]
    attention: float | None = None  # None: as products of many rows

    @classmethod
    def measure(cls, shape: Shape, device: torch.device, dtype: torch.dtype) -> Rates:
        """From products with matrices of the model's feed-forward size, as many as it has or as
        no processor cache holds.  On a CPU attention is measured, too."""
        size = shape.hidden, shape.intermediate
        count = min(3 * shape.layers, 1 + COLD // (size[0] * size[1] * dtype.itemsize))
        drawn = (torch.randn(size[1], size[0], device=device).to(dtype) for _ in range(count))
        weights = [partial(linear, weight=w, bias=None, packed=Packed()) for w in drawn]
        rates = []
        for rows in ROWS:
            inputs = torch.randn(rows, size[0], device=device).to(dtype)
            seconds = _seconds(inputs, weights)
            rates.append(2 * rows * size[0] * size[1] / seconds)
        attention = _attention(shape, dtype) if device.type == "cpu" else None
        return cls(ROWS, tuple(rates), attention)

    def at(self, rows: float) -> float:
        """Operations per second with ``rows`` rows."""
        times = [rows / rate for rows, rate in zip(self.rows, self.rate, strict=True)]
        if rows >= self.rows[-1]:
            return self.rate[-1]
        return rows / float(np.interp(rows, self.rows, times)) if rows else self.rate[0]

    def seconds(self, cost: StepCost) -> float:
        """The time of a step, if its attention ran like products of many rows."""
        return (
            cost.products / self.at(cost.computed)
            + cost.attention / (self.attention or max(self.rate))
            + cost.head / self.at(cost.scored)
        )


def _attention(shape: Shape, dtype: torch.dtype) -> float:
    """Operations per second of attention with a block of queries over a few hundred keys."""
    q = torch.randn(1, shape.heads, 32, shape.head_dim).to(dtype)
    k = torch.randn(1, shape.heads, 512, shape.head_dim).to(dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    return 4 * 32 * 512 * shape.heads * shape.head_dim / _seconds(q, [lambda x: attend(x, k, k)])


def _seconds(inputs: torch.Tensor, weights: Sequence[Product]) -> float:
    """The time of one product, from the fastest of three rounds over all ``weights``."""
    result = []
    with torch.inference_mode():
        for _ in range(4):  # the first is the warm-up
            start = time.perf_counter()
            for multiply in weights:
                multiply(inputs)
            if inputs.is_cuda:
                torch.cuda.synchronize()
            result.append(time.perf_counter() - start)
    return min(result[1:]) / len(weights)
