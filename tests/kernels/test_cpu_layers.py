"""Compiled norms, gates and rotation against PyTorch's, and a row alone against its company."""

import pytest
import torch
import torch.nn.functional as F

from dllm.kernels.cpu import layers
from dllm.kernels.rotation import rotate_scatter
from dllm.models.grouped import grouped

pytestmark = pytest.mark.usefixtures("compiled")
HALF, FULL = torch.bfloat16, torch.float32
SIZES = [1, 15, 16, 64, 577]


def near(own: torch.Tensor, other: torch.Tensor) -> None:
    """Equal, but for numbers that lie between two of their dtype."""
    steps = 2**-7 if own.dtype == HALF else 3e-6
    torch.testing.assert_close(own, other, rtol=steps, atol=1e-6)
    assert own.dtype != HALF or (own == other).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, weight = torch.randn(2, 41, size).mul_(3).to(dtype), torch.randn(size).to(dtype)
    x[0, 3] = 0
    with torch.inference_mode():
        own = layers.rms_norm(x, weight, 1e-5)
        near(own, weight * F.rms_norm(x.float(), (size,), None, 1e-5).to(dtype))
        assert torch.equal(layers.rms_norm(x[0, 7:8], weight, 1e-5)[0], own[0, 7])


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("size", SIZES)
def test_silu(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, other = torch.randn(30, size).mul_(20).to(dtype), torch.randn(30, size).to(dtype)
    x[0], x[1], x[2], x[3] = 1e4, -1e4, torch.inf, torch.nan
    with torch.inference_mode():
        own, plain = layers.silu_times(x, other), F.silu(x) * other
        near(own[4:], plain[4:])
        torch.testing.assert_close(own[:4], plain[:4], equal_nan=True)
        assert torch.equal(layers.silu_times(x[9], other[9]), own[9])


@pytest.mark.parametrize("angles", [HALF, FULL])
@pytest.mark.parametrize("buffer", [HALF, FULL])
@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("width", [8, 64, 96])
def test_rotation_has_the_bits_of_pytorch(
    width: int, dtype: torch.dtype, buffer: torch.dtype, angles: torch.dtype
) -> None:
    """Strided as projections and buffers are; other slots stay as they were."""
    torch.manual_seed(width)
    count, heads, shared = 7, 6, 2
    q, k, v = (
        torch.randn(count, each, width).to(dtype).transpose(0, 1)
        for each in (heads, shared, shared)
    )
    cos, sin = (torch.randn(count, width).to(angles) for _ in range(2))
    slots = torch.tensor([3, 19, 0, 5, 11, 6, 2])
    done = []
    for backend in ("torch", "compiled"):
        keys, values = torch.full((2, shared, 20, width), 9.0).to(buffer).unbind()
        with torch.inference_mode():
            turned = rotate_scatter(q, k, v, cos, sin, slots, keys, values, backend=backend)
        done.append((turned, keys, values))
    assert all(torch.equal(a, b) for a, b in zip(*done, strict=True))


@pytest.mark.parametrize(
    ("queries", "length", "size"),
    [(1, 1, 16), (3, 65, 64), (7, 64, 2), (32, 191, 64), (50, 700, 128), (100, 33, 96)],
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_attention(
    queries: int, length: int, size: int, masked: bool, exact: bool, dtype: torch.dtype
) -> None:
    """Against float64, in buffers whose other slots hold NaN; a query alone has its bits."""
    torch.manual_seed(queries + length)
    q = torch.randn(2, queries, 3, size).to(dtype).transpose(1, 2)
    k, v = torch.full((2, 2, 3, length + 5, size), torch.nan).to(dtype)[..., 2 : length + 2, :]
    k.copy_(torch.randn(k.shape)), v.copy_(torch.randn(v.shape))
    # float32: as many roundings in order as a score and its sum have terms, of either sign
    near = 0.02 if dtype == HALF else 2**-20 * (size + length) ** 0.5
    mask = None
    if masked:
        mask = torch.randn(2, queries, length).to(dtype)
        mask[torch.rand(mask.shape) < 0.5] = -torch.inf
        mask[0, 0] = -torch.inf  # sees nothing
    with torch.inference_mode():
        assert layers.attends(q, k, v, mask)
        own = layers.attention(q, k, v, mask, 0.2, exact)
        scores = q.double() @ k.double().transpose(2, 3) * 0.2
        scores = scores if mask is None else scores + mask[:, None].double()
        right = scores.softmax(-1).nan_to_num(0) @ v.double()
        torch.testing.assert_close(own.double(), right, rtol=near, atol=near)
        added = None if mask is None else mask[:, None]
        other = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=0.2)
        error, known = (x.nan_to_num(0).sub(right).norm() for x in (own, other))
        assert error < (1.2 * known + 1e-6 if dtype == HALF else near * right.norm() + 1e-6)
        for row, at in ((0, queries - 1), (1, 0)):
            here = slice(at, at + 1)
            less = None if mask is None else mask[row : row + 1, here]
            alone = layers.attention(
                q[row : row + 1, :, here], k[row : row + 1], v[row : row + 1], less, 0.2, exact
            )
            assert torch.equal(alone[0, :, 0], own[row, :, at])
        torch.set_num_threads(16)  # shares of a head's queries
        shared = layers.attention(q, k, v, mask, 0.2, exact)
        torch.set_num_threads(1)
        assert torch.equal(shared, own)


@pytest.mark.parametrize("hidden", [0, 3, 500])
def test_exact_attention_knows_no_order_of_keys(hidden: int) -> None:
    """The same keys in another order, with hidden ones between them; the plain sums do change."""
    torch.manual_seed(hidden)
    q, k, v = (torch.randn(1, 9, count, 64).to(HALF) for count in (64, 700, 700))
    order = torch.randperm(700 + hidden)
    more = torch.randn(2, 1, 9, hidden, 64).to(HALF)
    mask = torch.zeros(1, 64, 700 + hidden).to(HALF)
    mask[..., 700:] = -torch.inf
    keys, values = (torch.cat(x, 2)[:, :, order] for x in ((k, more[0]), (v, more[1])))
    with torch.inference_mode():
        assert layers.attends(q, k, v, None)
        both = [
            (
                grouped(q, k, v, 0.2, None, exact),
                grouped(q, keys, values, 0.2, mask[..., order], exact),
            )
            for exact in (True, False)
        ]
    assert torch.equal(*both[0])
    assert not torch.equal(*both[1])


def test_slots_outside_the_buffer_are_refused() -> None:
    q, angles = torch.randn(2, 3, 8), torch.randn(3, 8)
    keys = torch.zeros(2, 5, 8)
    with torch.inference_mode():
        for slot in (5, -1):
            slots = torch.tensor([0, slot, 1])
            with pytest.raises(IndexError, match="slots go from 0 to 4"):
                rotate_scatter(q, q, q, angles, angles, slots, keys, keys, backend="compiled")
    assert not keys.any()


def test_what_does_not_suit_is_left_to_pytorch() -> None:
    x = torch.randn(3, 16)
    assert not layers.suits(x)  # gradients are wanted
    with torch.inference_mode():
        assert layers.suits(x, x)
        assert not layers.suits(x, x.bfloat16()) and not layers.suits(x.half())
        with torch.autocast("cpu"):
            assert not layers.suits(x)
