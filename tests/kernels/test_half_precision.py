"""How far bfloat16 statistics are from float32 ones, as docs/kernels.md states it."""

import pytest
import torch

from ..thin import some
from .filtered import logits_statistics, token_statistics


@pytest.fixture(scope="module")
def head() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and a head whose largest logits lie around 10, close to one another."""
    generator = torch.Generator().manual_seed(4)
    hidden = 2 * torch.randn(96, 128, generator=generator)
    weight = torch.randn(1500, 128, generator=generator) * 128**-0.5
    return hidden.bfloat16(), weight.bfloat16()


@pytest.mark.parametrize("backend", some(["torch", "triton"], 1))
def test_bfloat16_against_the_same_numbers_in_float32(
    head: tuple[torch.Tensor, torch.Tensor], backend: str
) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    hidden, weight = head
    logits = hidden.float() @ weight.float().T
    exact, got = logits_statistics(logits), token_statistics(hidden, weight, backend=backend)
    if backend == "triton":  # the product is left in float32: only its order of sums differs
        assert torch.equal(got.token, exact.token)
        torch.testing.assert_close(got.logprob, exact.logprob, rtol=1e-4, atol=1e-4)
        return
    best = logits.amax(1)
    rounding = best * 2**-8  # half a unit in the last place of a bfloat16
    chosen = logits.gather(1, got.token[:, None])[:, 0]
    assert (best - chosen <= 2 * rounding).all()  # another token only in a near tie
    assert (got.token == exact.token).float().mean() >= 0.95
    assert ((got.logprob - exact.logprob).abs() <= 2 * rounding).all()
    assert (got.entropy - exact.entropy).abs().max() < 0.02
    assert (got.margin - exact.margin).abs().max() < 0.02
