"""Rotation and scatter: one meaning in three versions, and that of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dllm.errors import ConfigError, UnknownNameError
from dllm.kernels.rotation import rotate_scatter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(
    heads: int, kv_heads: int, count: int, width: int, dtype: torch.dtype, seed: int
) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(count, n, width, generator=g).to(DEVICE, dtype).transpose(0, 1)
        for n in (heads, kv_heads, kv_heads)
    )
    angle = torch.randint(0, 5000, (count, 1), generator=g) / 100 ** (torch.arange(width // 2) / 9)
    angle = angle.repeat(1, 2).to(DEVICE)
    slots = torch.randperm(count + 7, generator=g)[:count]
    slots[torch.rand(count, generator=g) < 0.2] = -1
    return {"q": q, "k": k, "v": v, "cos": angle.cos(), "sin": angle.sin(),
            "slots": slots.to(DEVICE)}  # fmt: skip


def run(backend: str, given_: dict[str, Any], kv_heads: int, size: int) -> tuple[torch.Tensor, ...]:
    width, dtype = given_["q"].shape[-1], given_["q"].dtype
    keys, values = torch.full((2, kv_heads, size, width), torch.nan, dtype=dtype, device=DEVICE)
    return rotate_scatter(**given_, keys=keys, values=values, backend=backend), keys, values


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings(max_examples=8, deadline=None)
@given(
    kv_heads=st.integers(1, 2), groups=st.integers(1, 3), count=st.integers(0, 4),
    width=st.sampled_from([2, 6, 16]), seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_agrees_with_the_oracle(
    backend: str, kv_heads: int, groups: int, count: int, width: int, seed: int, dtype: torch.dtype
) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    given_ = inputs(kv_heads * groups, kv_heads, count, width, dtype, seed)
    found = run(backend, given_, kv_heads, count + 7)
    expected = run("naive", given_, kv_heads, count + 7)
    # one rounding to bfloat16 may go to the other neighbour
    tolerance = {"rtol": 2**-7, "atol": 1e-6} if dtype == torch.bfloat16 else {}
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)  # untouched slots stay NaN
    assert torch.equal(found[2].isnan(), expected[2].isnan())


@pytest.mark.parametrize("backend", ["naive", "torch", "triton"])
def test_is_the_rotation_of_transformers(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    given_ = inputs(4, 2, 3, 8, torch.float32, 0)
    given_["slots"] = torch.tensor([4, 0, 9], device=DEVICE)
    got, keys, values = run(backend, given_, 2, 10)
    q, k = apply_rotary_pos_emb(
        given_["q"][None], given_["k"][None], given_["cos"][None], given_["sin"][None]
    )
    torch.testing.assert_close(got, q[0])
    torch.testing.assert_close(keys[:, [4, 0, 9]], k[0])
    assert torch.equal(values[:, [4, 0, 9]], given_["v"])
    assert keys.isnan().sum() == 7 * 2 * 8


def test_what_does_not_fit_is_refused() -> None:
    given_ = inputs(2, 1, 3, 8, torch.float32, 0)
    with pytest.raises(ConfigError, match="fit"):
        run("torch", {**given_, "slots": given_["slots"][:2]}, 1, 10)
    with pytest.raises(UnknownNameError):
        run("troch", given_, 1, 10)
