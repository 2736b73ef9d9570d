"""Tiny verifiers, and drafters that only tests need."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import dllm
from dllm.drafting.base import (
    ROOT,
    Budget,
    Distribution,
    Draft,
    Drafter,
    Drafting,
    DraftRequest,
    Feedback,
    chain,
)
from examples.nano.tokenizer import build_tokenizer

ARCHITECTURES = ("full", "windowed", "gqa")


def make_verifier(
    kind: str, seed: int = 0, vocab_size: int | None = None, tokenizer: Any = None
) -> dllm.DiffusionModel:
    """A random causal model: "full" attention, "windowed" (window of 6), or "gqa" with layers of
    both kinds."""
    tokenizer = tokenizer or build_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": vocab_size or len(tokenizer), "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 160,
        "initializer_range": 0.6, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    torch.manual_seed(seed)
    hf: Any
    if kind == "full":
        hf = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=4))
    elif kind == "windowed":
        hf = MistralForCausalLM(MistralConfig(**shape, num_key_value_heads=4, sliding_window=6))
    else:
        layers = ["full_attention", "sliding_attention"]
        hf = Qwen2ForCausalLM(Qwen2Config(
            **shape, num_key_value_heads=2, use_sliding_window=True, sliding_window=6,
            layer_types=layers,
        ))  # fmt: skip
    return dllm.load(hf, family="autoregressive", tokenizer=tokenizer)


@pytest.fixture(scope="session")
def verifiers() -> dict[str, dllm.DiffusionModel]:
    return {kind: make_verifier(kind) for kind in ARCHITECTURES}


@pytest.fixture(scope="session")
def verifier(verifiers: dict[str, dllm.DiffusionModel]) -> dllm.DiffusionModel:
    return verifiers["full"]


@dataclass
class Scripted(Drafter):
    """Proposes what ``text`` says at the position, ``k`` tokens, wrong with probability ``noise``.

    ``tree``: every node gets a wrong sibling as well, in random order.
    """

    text: Any = None
    k: int = 5
    noise: float = 0.0
    tree: bool = False
    seed: int = 0

    def open(self, request: DraftRequest) -> Drafting:
        return _Scripted(self, request)


class _Scripted(Drafting):
    def __init__(self, part: Scripted, request: DraftRequest) -> None:
        self.part, self.request = part, request
        self.rng = np.random.default_rng(part.seed)
        self.feedback: list[Feedback] = []

    def propose(self, prefix: np.ndarray, budget: Budget) -> Draft:
        part, rng, size = self.part, self.rng, self.request.vocab_size
        true = np.asarray(part.text[len(prefix) : len(prefix) + part.k] if part.text is not None
                          else [], np.int64)  # fmt: skip
        tokens = rng.integers(0, size, part.k)
        right = rng.random(len(true)) >= part.noise
        tokens[: len(true)][right] = true[right]
        tokens = tokens[: budget.length]
        if not part.tree:
            return chain(tokens, "scripted")
        nodes: list[int] = []
        parents: list[int] = []
        at = ROOT
        for token in tokens.tolist():
            both = [token, int(rng.integers(0, size))]
            main = int(rng.integers(0, 2))
            parents += [at, at]
            nodes += both if main == 0 else both[::-1]
            at = len(nodes) - 2 + main
        return Draft(np.asarray(nodes), np.asarray(parents), source="scripted")

    def observe(self, feedback: Feedback) -> None:
        self.feedback.append(feedback)


@dataclass
class Uniformly(Drafter):
    """Samples uniformly: distribution MARGINALS."""

    k: int = 3
    distributions = frozenset({Distribution.MARGINALS})

    def open(self, request: DraftRequest) -> Drafting:
        return _Uniformly(self, request)


class _Uniformly(Drafting):
    def __init__(self, part: Uniformly, request: DraftRequest) -> None:
        self.part, self.size = part, request.vocab_size
        self.rng = np.random.default_rng(request.noise_key[0])

    def propose(self, prefix: np.ndarray, budget: Budget) -> Draft:
        k = min(self.part.k, budget.length)
        log_q = np.full((k, self.size), -np.log(self.size))
        tokens = self.rng.integers(0, self.size, k)
        return Draft(tokens, None, Distribution.MARGINALS, log_q, np.full(k, 1 / self.size))


def prompts(count: int, seed: int = 0, size: int = 400) -> list[list[int]]:
    """Random prompts of 3 to 20 ids, some with repeated pieces."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        ids = rng.integers(5, size, rng.integers(3, 12)).tolist()
        result.append(ids + ids[: rng.integers(0, 8)])
    return result
