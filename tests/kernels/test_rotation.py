"""Rotation and scatter: one meaning in three versions, and that of transformers."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dllm.core.errors import ConfigError, UnknownNameError
from dllm.kernels.rotation import rotate_scatter
from dllm.kernels.rotation.torch import MANY

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["naive", "torch", "triton"]


def inputs(
    heads: int, kv_heads: int, count: int, width: int, dtype: torch.dtype, seed: int = 0,
    table: torch.dtype = torch.float32,
) -> dict[str, Any]:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(count, n, width, generator=g).to(DEVICE, dtype).transpose(0, 1)
        for n in (heads, kv_heads, kv_heads)
    )
    angle = torch.randint(0, 5000, (count, 1), generator=g) / 100 ** (torch.arange(width // 2) / 9)
    angle = angle.repeat(1, 2).to(DEVICE)
    slots = torch.randperm(count + 7, generator=g)[:count].to(DEVICE)
    cos, sin = angle.cos().to(table), angle.sin().to(table)
    return {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "slots": slots}


def run(backend: str, given_: dict[str, Any], kv_heads: int, size: int) -> tuple[torch.Tensor, ...]:
    """Rotated queries, keys and values in a buffer of ``size`` slots that held NaN before."""
    width, dtype = given_["q"].shape[-1], given_["q"].dtype
    keys, values = torch.full((2, kv_heads, size, width), torch.nan, dtype=dtype, device=DEVICE)
    return rotate_scatter(**given_, keys=keys, values=values, backend=backend), keys, values


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the Triton version returns holds NaN until it is written."""
    kernels = pytest.importorskip("dllm.kernels.rotation.triton")

    def empty_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_like(x, dtype=dtype).fill_(torch.nan)

    monkeypatch.setattr(kernels, "_empty_like", empty_like)


def exact_or_interpreted(backend: str, dtype: torch.dtype) -> dict[str, float]:
    """Triton's interpreter cuts off where a GPU rounds to bfloat16."""
    if backend == "triton" and DEVICE == "cpu" and dtype == torch.bfloat16:
        return {"rtol": 2**-6, "atol": 2**-5}
    return {"rtol": 0, "atol": 0}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", BACKENDS[1:])
@settings(max_examples=10, deadline=None)
@given(
    kv_heads=st.integers(1, 2), groups=st.integers(1, 3), count=st.integers(0, 4),
    width=st.sampled_from([2, 6, 16]), seed=st.integers(0, 999),
    dtypes=st.sampled_from([
        (torch.float32, torch.float32), (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
    ]),
)  # fmt: skip
def test_agrees_with_the_oracle(
    backend: str, kv_heads: int, groups: int, count: int, width: int, seed: int,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:  # fmt: skip
    given_ = inputs(kv_heads * groups, kv_heads, count, width, dtypes[0], seed, dtypes[1])
    result = run(backend, given_, kv_heads, count + 7)
    expected = run("naive", given_, kv_heads, count + 7)
    # a sum at the border of two half-precision numbers may go to the other neighbour
    tolerance = {} if dtypes[0] == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
    if dtypes[1] != torch.float32:  # every step is rounded: nothing is left open
        tolerance = exact_or_interpreted(backend, dtypes[0])
    for a, b in zip(result, expected, strict=True):
        assert a.dtype == dtypes[0]
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)  # untouched slots stay NaN
    assert not result[0].isnan().any()
    assert torch.equal(result[2].isnan(), expected[2].isnan())


@pytest.mark.parametrize("dtype, table", [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),  # Dream
    (torch.bfloat16, torch.float32),  # LLaDA
    (torch.float16, torch.float16),
])  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_is_the_rotation_of_transformers(
    backend: str, dtype: torch.dtype, table: torch.dtype
) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    given_ = inputs(4, 2, 3, 8, dtype, table=table)
    given_["slots"] = torch.tensor([4, 0, 9], device=DEVICE)
    got, keys, values = run(backend, given_, 2, 10)
    names = ("q", "k", "cos", "sin")
    q, k = (x[0].to(dtype) for x in apply_rotary_pos_emb(*(given_[n][None] for n in names)))
    exact = {} if dtype == torch.float32 else exact_or_interpreted(backend, dtype)
    torch.testing.assert_close(got, q, **exact)
    torch.testing.assert_close(keys[:, [4, 0, 9]], k, **exact)
    assert torch.equal(values[:, [4, 0, 9]], given_["v"])
    assert keys.isnan().sum() == 7 * 2 * 8


@pytest.mark.parametrize("dtype, table", [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
])  # fmt: skip
def test_many_rows_turn_to_the_same_bits(dtype: torch.dtype, table: torch.dtype) -> None:
    given_ = inputs(9, 3, MANY // 64 // 9 + 1, 64, dtype, table=table)
    got, keys, values = run("torch", given_, 3, given_["q"].shape[1] + 7)
    for i in range(0, given_["q"].shape[1], 40):  # a few at a time go the other way
        part = {n: x[i : i + 40] if n in ("cos", "sin", "slots") else x[:, i : i + 40]
                for n, x in given_.items()}  # fmt: skip
        few, some_keys, some_values = run("torch", part, 3, keys.shape[1])
        assert torch.equal(got[:, i : i + 40], few)
        assert torch.equal(keys[:, part["slots"]], some_keys[:, part["slots"]])
        assert torch.equal(values[:, part["slots"]], some_values[:, part["slots"]])


def test_what_does_not_fit_is_refused() -> None:
    given_ = inputs(2, 1, 3, 8, torch.float32)
    with pytest.raises(ConfigError, match="fit"):
        run("torch", {**given_, "slots": given_["slots"][:2]}, 1, 10)
    with pytest.raises(UnknownNameError):
        run("troch", given_, 1, 10)
