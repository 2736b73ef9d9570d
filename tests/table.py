"""A model whose logits are a function in a test: the engine runs without weights."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from dllm.models import DiffusionModel, Facts, Family

VOCAB, MASK, EOS = 32, 31, 30

# (token ids, positions) of one packed row -> logits (Q, VOCAB)
Table = Callable[[np.ndarray, np.ndarray], np.ndarray]


class _Backbone(nn.Module):
    """Hidden states are the logits themselves; the head is the identity."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table, self.calls = table, cast("list[int]", [])

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, segments: Any, **_: Any
    ) -> Any:
        self.calls.append(input_ids.shape[1])
        ids, positions = input_ids[0].numpy(), position_ids[0].numpy()
        logits = np.zeros((len(ids), VOCAB))
        for segment in segments:  # rows do not see one another
            first, count = segment.queries.start, segment.queries.stop - segment.queries.start
            size = count // segment.rows
            for low in range(first, first + count, max(size, 1)):
                here = slice(low, low + size)
                logits[here] = self.table(ids[here], positions[here])
        return SimpleNamespace(last_hidden_state=torch.from_numpy(logits).float()[None])


class _Network:
    def __init__(self, table: Table) -> None:
        self.base_model = _Backbone(table)
        self.config = PreTrainedConfig(num_hidden_layers=1)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.head = nn.Linear(VOCAB, VOCAB, bias=False)
        self.head.weight.data = torch.eye(VOCAB)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def table_model(table: Table, **facts: Any) -> DiffusionModel:
    """A model with the given logits; mask 31, end of text 30, no tokenizer."""
    known: dict[str, Any] = {
        "mask_token_id": MASK, "eos_token_id": EOS, "stop_token_ids": (EOS,),
        "pad_token_id": EOS, "bos_token_id": None, "logit_shift": 0,
        "mask_kind": "bidirectional", "context_length": 4096, "vocab_size": VOCAB,
        "score_source": "clean",
    }  # fmt: skip
    family = Family("llada", ())
    return DiffusionModel(
        hf=cast(Any, _Network(table)), tokenizer=None, family=family,
        facts=Facts(**{**known, **facts}), name="table",
    )  # fmt: skip


def with_probabilities(token: int, probability: float) -> np.ndarray:
    """Logits (VOCAB,) that give ``token`` that probability and share the rest out."""
    logits = np.full(VOCAB, np.log((1 - probability) / (VOCAB - 2)))
    logits[token] = np.log(probability)
    logits[MASK] = -80.0  # the head multiplies: infinities would become NaN
    return logits


def hashed(seed: int, sharpness: float = 4.0) -> Table:
    """Pseudo-random logits that depend on position and on the whole packed input."""

    def table(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        mix = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mix ^= (positions.astype(np.uint64) + np.uint64(seed)) << np.uint64(20)
        context = int(np.bitwise_xor.reduce(mix * np.uint64(0xBF58476D1CE4E5B9)) % 2**31)
        rows = [
            np.random.default_rng((seed, context, int(p))).normal(size=VOCAB) for p in positions
        ]
        return np.stack(rows) * sharpness

    return table
