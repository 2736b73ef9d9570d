"""What bfloat16 makes true on a CPU: a token's logits do not depend on what is scored beside it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dllm
from dllm.drafting.base import EMPTY, Draft, chain
from dllm.drafting.verifiers.packed import WASTE, PackedVerifier, open_verifier
from dllm.engine.packing import Packing
from dllm.models.grouped import exact_attention

from ...thin import some
from ..conftest import Scripted

CPU = Path("/proc/cpuinfo")
FLAGS = set(CPU.read_text(encoding="utf-8").split()) if CPU.exists() else set[str]()
NATIVE = {"amx_bf16", "avx512_bf16"} & FLAGS
native = pytest.mark.skipif(not NATIVE, reason="bfloat16 is not native on this processor")
SIZE = 900


def network() -> dllm.DiffusionModel:
    """Heads that share keys, and products as long as those of a small real model."""
    torch.manual_seed(0)
    hf = LlamaForCausalLM(LlamaConfig(
        vocab_size=SIZE, hidden_size=576, intermediate_size=1536, num_hidden_layers=3,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048,
        initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    ))  # fmt: skip
    return dllm.load(hf.to(torch.bfloat16), family="autoregressive")


@pytest.fixture(scope="module")
def model() -> dllm.DiffusionModel:
    return network()


def one_by_one(model: dllm.DiffusionModel, ids: np.ndarray, start: int) -> torch.Tensor:
    """Logits after every token from ``start`` on, each from a forward of its own."""
    verifier = open_verifier(model)
    text = verifier.open(ids[:start], len(ids) + 1)
    rows = []
    for token in [*ids[start:].tolist(), 0]:
        rows.append(verifier.score([(text, EMPTY)])[0].logits[0])
        verifier.commit(text, EMPTY, [], [token])
    return torch.stack(rows)


@native
@pytest.mark.parametrize("count", some([1, 2, 5, 8, 16, 33], 2))
def test_drafts_do_not_change_a_bit(model: dllm.DiffusionModel, count: int) -> None:
    """A chain scored at once, against its tokens one by one."""
    ids = np.random.default_rng(count).integers(0, SIZE, 150 + count)
    verifier = open_verifier(model)
    together = verifier.score([(verifier.open(ids[:150], 200), chain(ids[150:]))])[0].logits
    assert torch.equal(together, one_by_one(model, ids, 150))


@native
@pytest.mark.parametrize("length", some([150, 1100], 1))
def test_trees_do_not_change_a_bit(model: dllm.DiffusionModel, length: int) -> None:
    """Every path of a tree against the chain of its tokens: the same keys lie elsewhere."""
    rng = np.random.default_rng(length)
    ids, tokens = rng.integers(0, SIZE, length), rng.integers(0, SIZE, 24)
    parents = np.array([int(rng.integers(max(-1, i - 6), i)) for i in range(24)])
    tree = Draft(tokens, parents)
    verifier = open_verifier(model)
    rows = verifier.score([(verifier.open(ids, length + 40), tree)])[0].logits
    leaves = sorted(set(range(24)) - set(parents.tolist()))
    for leaf in leaves if length < 1000 else leaves[::4]:
        path = tree.path(leaf)
        text = verifier.open(ids, length + 40)
        along = verifier.score([(text, chain(tokens[path]))])[0].logits
        verifier.close(text)
        assert torch.equal(along, rows[[0, *(node + 1 for node in path)]])


@native
def test_neighbours_do_not_change_a_bit(model: dllm.DiffusionModel) -> None:
    """Texts of many lengths in one forward, with drafts and without, against each alone."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, SIZE, n) for n in (3, 40, 41, 200, 1300)]
    verifier = open_verifier(model)
    work = [(verifier.open(ids, len(ids) + 40), EMPTY) for ids in texts]
    verifier.score(work)
    for text, _ in work:
        verifier.commit(text, EMPTY, [], [7])
    drafts = [chain(rng.integers(0, SIZE, n)) for n in (0, 4, 1, 12, 4)]
    together = verifier.score([(text, d) for (text, _), d in zip(work, drafts, strict=True)])
    for ids, draft, rows in zip(texts, drafts, together, strict=True):
        whole = np.concatenate([ids, [7], draft.tokens])
        assert torch.equal(rows.logits, one_by_one(model, whole, len(ids) + 1))


@native
def test_trees_of_one_size_are_attended_together(model: dllm.DiffusionModel) -> None:
    """In one call, each with the token before it, and without a bit of difference to it alone."""
    rng = np.random.default_rng(3)
    verifier = open_verifier(model)
    assert isinstance(verifier, PackedVerifier)
    texts = [verifier.open(rng.integers(0, SIZE, n), 130) for n in (20, 41, 90)]
    verifier.score([(text, EMPTY) for text in texts])
    trees = []
    for text in texts:
        verifier.commit(text, EMPTY, [], [7])
        parents = np.array([int(rng.integers(max(-1, i - 3), i)) for i in range(6)])
        trees.append(Draft(rng.integers(0, SIZE, 6), parents))
    packing = Packing()
    for text, tree in zip(texts, trees, strict=True):
        verifier.feed(packing, text, tree)
    (segment,) = packing.packed(model.device, WASTE, verifier.buffer.size).segments
    assert segment.rows == 3
    together = verifier.score(list(zip(texts, trees, strict=True)))
    for text, tree, rows in zip(texts, trees, together, strict=True):
        assert torch.equal(verifier.score([(text, tree)])[0].logits, rows.logits)


@native
@pytest.mark.parametrize("temperature", some([1.0, 0.0], 1))
def test_texts_are_the_same_in_bfloat16(model: dllm.DiffusionModel, temperature: float) -> None:
    """Plain, drafted as chains and trees, and in batches: the same tokens and log-probabilities."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, SIZE, n).tolist() for n in (5, 80)]
    how: dict[str, Any] = {"max_new_tokens": 16, "temperature": temperature, "seed": 3}
    plain = [dllm.speculate(model, None, prompt, **how) for prompt in prompts]
    batch = dllm.speculate(model, None, prompts, **how)
    for prompt, one, other in zip(prompts, plain, batch, strict=True):
        assert one.tokens == other.tokens
        assert np.array_equal(one.logprobs, other.logprobs)
        text = [*prompt, *one.tokens]
        for tree in (False, True):
            drafter = Scripted(text, noise=0.3, tree=tree)
            result = dllm.speculate(model, drafter, prompt, controller="full", **how)
            assert result.tokens == one.tokens
            assert np.array_equal(result.logprobs, one.logprobs)
            assert result.accepted > 5


def test_sdpa_is_what_the_network_runs_otherwise(model: dllm.DiffusionModel) -> None:
    """``exact=False`` and float32 keep the network's attention."""
    assert open_verifier(model).attention == "dllm_eager"
    assert open_verifier(model, exact=False).attention == "dllm_sdpa"


@native
@pytest.mark.parametrize("seed", [48, 114])
def test_short_texts_are_attended_as_long_ones(seed: int) -> None:
    """A token's three queries over seven keys: PyTorch sums so few products in another order."""
    torch.manual_seed(seed)
    k, q = torch.randn(3, 7, 64).bfloat16(), torch.randn(3, 300, 64).bfloat16()
    parts = [exact_attention(q[:, i : i + 3], k, k, 0.125, None) for i in range(0, 300, 3)]
    assert torch.equal(torch.cat(parts, 1), exact_attention(q, k, k, 0.125, None))
