"""S2D2's rule against numbers written out, and its forwards against the autoregressive network."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dllm
from dllm.core.canvas import Canvas
from dllm.engine import forward
from dllm.kernels.divergence import residual
from dllm.samplers import Feed, Prediction, Sampler, Seen, compose
from dllm.samplers.s2d2 import run
from dllm.train.recipes.convert import in_blocks

from ..kernels.test_filters import chi_square
from .test_vectors import canvas_of

Q = [0.9, 0.3, 0.2, 0.8, 0.8]  # of the drafts, where they are judged
P = [0.6, 0.6, 0.8, 0.8, 0.9]  # where they were drafted


def drafted(sampler: Sampler, coins: list[float]) -> tuple[Canvas, Feed, dllm.samplers.Decision]:
    """Positions 0 to 2, and 4 to 5 of a row of six, drafted as 10, 11, ...; 3 is decided.  With
    what the next forward feeds."""
    canvas = canvas_of(6)
    canvas.noise = lambda stream, step, at: np.array(coins, np.float32)[: len(at)]
    canvas.commit(np.array([3]), np.array([9]), np.zeros(1, np.float32))
    sampler.prepare(canvas)
    at, _ = sampler.reads(canvas)
    entropy = np.array([0.0, np.log(2) / 2, 0.0, 0.0, 0.0], np.float32)
    prediction = Prediction(at, 10 + np.arange(5), np.log(np.float32(P)), entropy=entropy,
                            margin=np.array([0.5, 0.5, 0.01, 0.5, 0.5], np.float32))  # fmt: skip
    decision = sampler.decide(canvas, sampler.feeds(canvas), [Seen(canvas, prediction)])
    return canvas, sampler.feeds(canvas), decision


def judged(sampler: Sampler, canvas: Canvas, feed: Feed) -> dict[int, int]:
    """What is committed after the forward that verifies, which offers 20, 21, ... in place."""
    at = feed.masks
    n, gain = len(at), np.log(np.float32(Q) / np.float32(P))
    masks = Prediction(at, 20 + np.arange(n), np.full(n, -1.0, np.float32),
                       asked={"stands": gain[:n, None]})  # fmt: skip
    fed = canvas.fork()
    (draft,) = feed.branches
    fed.commit(draft.positions, draft.tokens, draft.logprobs)
    decision = sampler.decide(canvas, feed, [Seen(fed, masks.take(np.zeros(0, np.int64)), masks)])
    return dict(zip(decision.committed.tolist(), decision.tokens.tolist(), strict=True))


@pytest.mark.parametrize(
    ("options", "coins", "expected"),
    [
        ("", [0.99, 0.49, 0.24], {0: 10, 1: 11, 2: 12}),
        ("", [0.99, 0.49, 0.26], {0: 10, 1: 11, 2: 22}),
        ("", [0.99, 0.51, 0.1], {0: 10, 1: 21}),
        (", tempering=2", [0.99, 0.3, 0.1], {0: 10, 1: 21}),
        (", resample=False", [0.99, 0.51, 0.1], {0: 10, 1: 11}),
        (", n=4", [0.99, 0.51, 0.1], {0: 10, 1: 21, 5: 14}),
        (", sure=True", [0.99, 0.51, 0.1], {0: 10, 1: 21, 2: 12, 4: 13, 5: 14}),
        (", ratio=0.25", [0.99, 0.51, 0.1], {0: 10, 1: 21, 2: 12}),
        (", ratio=0.85, everywhere=True", [0.99, 0.51, 0.1], {0: 10, 1: 21, 4: 13, 5: 14}),
    ],
)
def test_drafts_stand_up_to_the_first_that_does_not(
    options: str, coins: list[float], expected: dict[int, int]
) -> None:
    tau = 0.75 if "sure" in options else 0.85
    sampler = compose(f"s2d2(policy=span{options})+threshold({tau}, n=2)")
    canvas, feed, decision = drafted(sampler, coins)
    assert not decision.committed.size
    (draft,) = feed.branches
    assert draft.positions.tolist() == [0, 1, 2, 4, 5]
    assert judged(sampler, canvas, feed) == expected


@pytest.mark.parametrize(
    ("options", "verifies"),
    [
        ("policy=span, tau_span=3", True),
        ("policy=span, tau_span=4", False),
        # 1 + exp(-1/2) + exp(-1/2) with a vocabulary of two: 2.21
        ("policy=score, c=1, tau_score=1.2, vocab_size=2", True),
        ("policy=score, c=1, tau_score=1.3, vocab_size=2", False),
        ("policy=score, c=1, dynamic=True, tau=0.7, tau_score=-0.7, vocab_size=2", False),
        ("policy=score, c=0, tau_score=2, estimator=margin", True),
        ("policy=score, c=0, tau_score=2.1, estimator=margin", False),
        ("policy=score, c=0, tau_score=2, estimator=margin, margin=0.5", False),
        ("policy=hysteresis, c=0, tau_on=2, estimator=margin", False),
        ("policy=hysteresis, c=0, tau_on=1.9, estimator=margin", True),
    ],
)
def test_when_it_verifies(options: str, verifies: bool) -> None:
    _, feed, decision = drafted(compose(f"s2d2({options})"), [0.5] * 5)
    assert bool(feed.branches) is verifies
    assert bool(decision.committed.size) is not verifies


def test_a_bidirectional_model_is_refused() -> None:
    with pytest.raises(
        dllm.ConfigError,
        match="s2d2 needs block-causal attention, which nano does not offer; "
        r"load a block-diffusion model \(SDAR, LLaDA2, ",
    ):
        dllm.generate(dllm.load("nano"), "What is 2 + 3?", sampler="s2d2")


@pytest.fixture(scope="module")
def small() -> tuple[Any, dllm.DiffusionModel]:
    """An autoregressive network over 13 ids, and the same as a model of blocks of 4."""
    torch.manual_seed(1)
    hf: Any = LlamaForCausalLM(LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, initializer_range=0.5,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )).eval()  # fmt: skip
    return hf, in_blocks(dllm.load(hf, eos_token_id=1), 4, 12)


@pytest.mark.parametrize(
    ("count", "how"),
    [(150, {"temperature": 0.6, "top_p": 0.8}),
     pytest.param(4000, {"temperature": 1.0}, marks=pytest.mark.slow),
     pytest.param(4000, {"temperature": 0.7}, marks=pytest.mark.slow),
     pytest.param(4000, {"temperature": 1.4, "top_k": 5, "min_p": 0.02}, marks=pytest.mark.slow)],
)  # fmt: skip
@torch.inference_mode()
def test_texts_are_distributed_as_those_of_blocks_of_one_position(
    small: tuple[Any, dllm.DiffusionModel], count: int, how: dict[str, Any]
) -> None:
    """Pairs of tokens against the product of the exact probabilities: with blocks of one position
    the token at each place is drawn from what a mask there says behind the text."""
    hf, model = small
    prompt, n = [5, 7, 2, 9, 4], 13
    results = dllm.generate(
        model, [prompt] * count, sampler="s2d2(policy=span, causal=True)", cache="none",
        max_new_tokens=2, eos_policy="none", max_batch_size=count, **how,
    )  # fmt: skip
    assert sum(r.nfe for r in results) < 3.9 * count  # some second tokens were accepted drafts

    def exact(texts: torch.Tensor) -> np.ndarray[Any, Any]:
        masks = torch.full((len(texts), 1), 12)
        logits = hf(torch.cat([texts, masks], 1)).logits[:, -1].float()
        logits[:, 12] = -torch.inf
        return naive(logits, **how)

    first = exact(torch.tensor([prompt]))[0]
    then = exact(torch.tensor([[*prompt, token] for token in range(n)]))
    counts = np.zeros((n, n))
    for result in results:
        counts[tuple(result.sequences[-2:])] += 1
    assert chi_square(counts.ravel(), (first[:, None] * then).ravel()) < 4


def naive(
    logits: torch.Tensor, temperature: float, top_p: float = 1, top_k: int = 0, min_p: float = 0
) -> np.ndarray[Any, Any]:
    """(n, V) probabilities after temperature, top-p, top-k and min-p of the whole."""
    result = []
    for row in (logits.double() / temperature).softmax(-1).numpy():
        order = np.argsort(-row, kind="stable")
        before = row[order].cumsum() - row[order]
        keep = (before < top_p) & (row[order] >= min_p * row.max())
        keep[top_k or len(row) :] = False
        kept = np.zeros_like(row)
        kept[order[keep]] = row[order[keep]]
        result.append(kept / kept.sum())
    return np.array(result)


def test_a_batch_equals_its_rows_alone(small: tuple[Any, dllm.DiffusionModel]) -> None:
    prompts = [[5, 7, 2], [9], [4, 4, 8, 3, 6, 2]]
    how: dict[str, Any] = {"sampler": "s2d2+threshold(0.6)", "cache": "block", "temperature": 0.8,
                           "max_new_tokens": 10}  # fmt: skip
    together = dllm.generate(small[1], prompts, **how)
    for prompt, beside in zip(prompts, together, strict=True):
        alone = dllm.generate(small[1], prompt, **how)
        assert (alone.tokens, alone.order, alone.nfe, alone.computed) == (
            beside.tokens, beside.order, beside.nfe, beside.computed,
        )  # fmt: skip


def test_runs() -> None:
    assert [run(np.array(at)) for at in ([], [4], [4, 5, 7], [4, 6, 7], [4, 5, 6])] == [
        0,
        1,
        2,
        1,
        3,
    ]


@pytest.mark.parametrize("cache", ["none", "block"])
def test_a_network_with_shifted_logits_judges_as_it_writes_from_left_to_right(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``causal`` nothing is left of blocks in what judges: the verifying distributions are
    those of the autoregressive network behind the same text."""
    causal = dllm.load("nano-ar", dtype="float32")
    model, seen = in_blocks(causal, 4, None), list[tuple[list[int], torch.Tensor]]()

    def watched(q: torch.Tensor, p: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        seen.append((keys[:, 2].tolist(), q))
        return residual(q, p, keys)

    monkeypatch.setattr(forward, "residual", watched)
    result = dllm.generate(
        model, "Copy this list: Tom, Anna", sampler="s2d2(policy=span, causal=True)", cache=cache,
        max_new_tokens=12, eos_policy="none", suppress_mask=False, trace=True,
    )  # fmt: skip
    assert isinstance(result, dllm.Result)
    ids = torch.from_numpy(result.sequences)[None]
    expected = causal.hf(ids).logits[0].log_softmax(-1)
    assert len(seen) > 3
    for positions, logprobs in seen:  # the first of a run stands behind final text alone
        assert torch.allclose(logprobs[0], expected[positions[0] - 1], atol=1e-4)
