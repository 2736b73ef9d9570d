"""Log-probabilities of given ids against their definition."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dllm.kernels.divergence import log_probabilities
from dllm.kernels.statistics import logprobs_of, naive

from .filtered import token_statistics

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def heads(draw: st.DrawFn) -> tuple[torch.Tensor, nn.Linear, torch.Generator]:
    """Hidden rows and a head, some of whose ids are equal."""
    rows, size, depth = draw(st.integers(0, 5)), draw(st.integers(1, 70)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    head = nn.Linear(depth, size, bias=draw(st.booleans()), dtype=draw(DTYPES))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(2 * torch.randn(parameter.shape, generator=generator))
            parameter[size // 2] = parameter[0]  # a tie
    hidden = torch.randn(rows, depth, generator=generator).to(head.weight.dtype)
    return hidden, head.requires_grad_(False), generator


def exact(hidden: torch.Tensor, head: nn.Linear) -> np.ndarray[Any, Any]:
    """(R, V) float64 log-probabilities of unrounded logits."""
    bias = 0.0 if head.bias is None else head.bias.double()
    rows = hidden.double() @ head.weight.double().T + bias
    return np.array([naive.log_softmax(row) for row in rows.numpy()]).reshape(rows.shape)


@settings(max_examples=60, deadline=None)
@given(case=heads(), count=st.integers(0, 4), called=st.booleans())
def test_log_probabilities_of_ids(case: Any, count: int, called: bool) -> None:
    hidden, head, generator = case
    full = exact(hidden, head)
    ids = torch.randint(0, head.out_features, (len(hidden), count), generator=generator)
    token = torch.randint(0, head.out_features, (len(hidden),), generator=generator)
    rows = np.arange(len(hidden))
    known = torch.from_numpy(full[rows, token.numpy()]).float()
    got = logprobs_of(hidden, (lambda h: head(h)) if called else head, ids, token, known)
    assert got.shape == ids.shape and got.dtype == torch.float32
    # a called head rounds its logits, of at most some 60, to its own dtype
    half = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
    atol = 60 * half[head.weight.dtype] if called else 1e-4
    np.testing.assert_allclose(got.numpy(), full[rows[:, None], ids.numpy()], rtol=1e-5, atol=atol)


def test_ids_beside_the_statistics_they_extend() -> None:
    """As the engine uses it: the proposal fixes the normalisation, at a temperature too."""
    hidden, head = torch.randn(6, 8), nn.Linear(8, 50)
    keys = torch.arange(24).view(6, 4)
    result = token_statistics(hidden, head, temperature=1.3, noise_keys=keys)
    wanted = hidden.double() @ head.weight.double().T + head.bias.double()
    wanted = wanted.log_softmax(1)
    ids = torch.arange(50).expand(6, 50)
    got = logprobs_of(hidden, head, ids, result.token, result.logprob)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(case=heads(), data=st.data())
def test_full_log_probabilities(case: Any, data: st.DataObject) -> None:
    hidden, head, _ = case
    banned = data.draw(st.lists(st.integers(0, head.out_features - 1), max_size=3, unique=True))
    logits = head(hidden).double().numpy()
    logits[:, banned] = -np.inf
    before = hidden.clone()
    got = log_probabilities(hidden, head, banned)
    assert got.dtype == torch.float32 and got.shape == logits.shape
    assert torch.equal(hidden, before)
    if len(banned) == head.out_features:
        return  # nothing is possible: no distribution to compare with
    expected = np.array([naive.log_softmax(row) for row in logits]).reshape(logits.shape)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert (got[:, banned] == -torch.inf).all()


def test_a_head_that_must_be_called_keeps_its_logits() -> None:
    logits = torch.randn(3, 20)
    before = logits.clone()
    log_probabilities(logits, lambda h: h, [4])
    assert torch.equal(logits, before)
