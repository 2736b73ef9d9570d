"""What only a GPU shows: production sizes, races between splits, memory, rounding of bfloat16."""

from typing import Any

import pytest
import torch

from dllm.kernels import noise
from dllm.kernels.rotation import rotate_scatter

from .filtered import logits_statistics, token_statistics
from .test_rotation import inputs
from .test_statistics import agree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
DEVICE = "cuda"
HEADS = {"llada": (4096, 126_464), "dream": (3584, 152_064)}


def rows_and_head(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    width, vocabulary = HEADS[name]
    torch.manual_seed(0)
    hidden = 2 * torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, width, device=DEVICE, dtype=torch.bfloat16) * width**-0.5
    return hidden, weight


@pytest.mark.parametrize("rows", [1, 32, 300])
@pytest.mark.parametrize("name", HEADS)
def test_statistics_of_a_real_head(name: str, rows: int) -> None:
    """Fused against the same numbers from float32 logits, twice: a race would show as a change."""
    hidden, weight = rows_and_head(name, rows)
    keys = noise.pack_keys([(1, 0, row, 2) for row in range(rows)], DEVICE)
    cases: list[dict[str, Any]] = [
        {"top": 4}, {"temperature": 0.8, "noise_keys": keys},
        {"temperature": 0.5, "noise_keys": keys, "top_p": 0.9, "tempered": True},
    ]  # fmt: skip
    logits = hidden.float() @ weight.float().T
    for chosen in cases:
        got, again = (token_statistics(hidden, weight, backend="triton", **chosen) for _ in "ab")
        agree(got, again, rtol=0, atol=0)
        exact = logits_statistics(logits, backend="torch", **chosen)
        assert (got.token == exact.token).float().mean() >= 0.99  # sums differ in their last bits
        same = got.token == exact.token
        # flat rows below top-p are done again by `torch`, from logits rounded to bfloat16
        near = {"rtol": 0.0, "atol": 0.1} if "top_p" in chosen else {"rtol": 1e-3, "atol": 1e-3}
        torch.testing.assert_close(got.logprob[same], exact.logprob[same], **near)
        torch.testing.assert_close(got.entropy, exact.entropy, **near)


def test_logits_are_never_in_memory() -> None:
    hidden, weight = rows_and_head("llada", 768)
    token_statistics(hidden, weight, backend="triton")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_statistics(hidden, weight, backend="triton")
    assert torch.cuda.max_memory_allocated() - before < 32 << 20  # the logits are 388 MB


@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, kv_heads", [(32, 32), (28, 4)])
def test_rotation_rounds_as_torch_does(heads: int, kv_heads: int, table: torch.dtype) -> None:
    given = inputs(heads, kv_heads, 768, 128, torch.bfloat16, table=table)
    given = {name: x.to(DEVICE) for name, x in given.items()}
    result = []
    for backend in ("triton", "torch"):
        buffers = torch.zeros(2, kv_heads, 800, 128, device=DEVICE, dtype=torch.bfloat16)
        result.append((rotate_scatter(**given, keys=buffers[0], values=buffers[1], backend=backend),
                      *buffers))  # fmt: skip
    for a, b in zip(*result, strict=True):
        assert torch.equal(a, b)
