"""Activations of a number, whatever stands beside it."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional as F

from dllm.kernels.activations import gelu, gelu_tanh, sigmoid, silu

Activation = Callable[[torch.Tensor], torch.Tensor]
PAIRS = [
    (sigmoid, torch.sigmoid), (silu, F.silu),
    (gelu, lambda x: F.gelu(x if x.requires_grad else x.double()).to(x.dtype)),  # NaN of inf
    (gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
]  # fmt: skip


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_what_stands_beside(
    ours: Activation, theirs: Activation, dtype: torch.dtype, threads: None
) -> None:
    """Parts of 1 to 300 numbers, and of so many that threads share them."""
    torch.manual_seed(0)
    x = (4 * torch.randn(200_000)).to(dtype)
    for width in (*range(1, 300, 7), 40_001, 70_003):
        for count in (1, 3):
            torch.set_num_threads(count)
            with torch.inference_mode():
                whole = ours(x)
                parts = [ours(part.clone()) for part in x[: 40 * width].split(width)]
            assert torch.equal(torch.cat(parts), whole[: 40 * width]), (width, count)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(
        whole, theirs(x), rtol=2 * step, atol=4 * torch.finfo(torch.float32).eps
    )


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_edges_and_gradients(ours: Activation, theirs: Activation) -> None:
    x = torch.tensor([0.0, -0.0, 200.0, -200.0, torch.inf, torch.nan, 3e38, 1e-40])
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), theirs(x), equal_nan=True)
    x = torch.randn(7, requires_grad=True)
    assert torch.equal(*(torch.autograd.grad(f(x).sum(), x)[0] for f in (ours, theirs)))
