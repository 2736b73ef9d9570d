"""Fused statistics in Triton against the float64 oracle.  Without a GPU the interpreter runs them:
what is computed is tested then, but neither speed nor races."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dllm.core.errors import ConfigError
from dllm.kernels import statistics
from dllm.kernels.rotation import rotate_scatter
from dllm.kernels.statistics import classes
from dllm.kernels.statistics.result import FIELDS

from ..thin import some
from .filtered import logits_statistics, token_statistics
from .test_statistics import agree, cases, keys

fused = pytest.importorskip("dllm.kernels.statistics.triton")
segments = pytest.importorskip("dllm.kernels.statistics.segments")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SIZES = (1, 2, 63, 64, 65, 130, 197)  # an example takes the interpreter a good part of a second

Case = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 64 ids, several to a split, lists of 8; outputs hold NaN until they are written."""
    monkeypatch.setattr(fused, "BLOCK_V", 64)
    monkeypatch.setattr(fused, "LISTED", 8)
    monkeypatch.setattr(fused, "FILTER_SPLITS", 2)
    monkeypatch.setattr(fused, "_processors", lambda device: 1)
    monkeypatch.setattr(fused, "_empty", poisoned)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    fill = torch.nan if dtype.is_floating_point else -(2**62)
    return torch.full(shape, fill, dtype=dtype, device=device)


def on_device(chosen: dict[str, Any]) -> dict[str, Any]:
    return {n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in chosen.items()}


def compare(hidden: torch.Tensor, weight: torch.Tensor, **chosen: Any) -> None:
    hidden, weight, chosen = hidden.to(DEVICE), weight.to(DEVICE), on_device(chosen)
    agree(  # products sum in another order
        token_statistics(hidden, weight, backend="triton", **chosen),
        token_statistics(hidden, weight, backend="naive", **chosen),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(case=cases(SIZES))
def test_fused_with_the_head(case: Case) -> None:
    hidden, weight, chosen = case
    compare(hidden, weight, **chosen)


@settings(max_examples=8, deadline=None)
@given(case=cases(SIZES), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_given_logits(case: Case, dtype: torch.dtype) -> None:
    hidden, weight, chosen = case
    logits, chosen = (hidden @ weight.T).to(DEVICE, dtype), on_device(chosen)
    before = logits.clone()
    agree(
        logits_statistics(logits, backend="triton", **chosen),
        logits_statistics(logits, backend="naive", **chosen),
    )
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_head_is_multiplied_without_rounding(dtype: torch.dtype) -> None:
    hidden, weight = torch.randn(9, 64).to(dtype), torch.randn(135, 64).to(dtype)
    got = token_statistics(hidden.to(DEVICE), weight.to(DEVICE), backend="triton", top=3)
    exact = logits_statistics((hidden.double() @ weight.double().T).to(DEVICE), backend="naive",
                              top=3)  # fmt: skip
    agree(got, exact, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_ties_go_to_the_lowest_id() -> None:
    for first, second in [(0, 149), (63, 64), (127, 128)]:
        weight = torch.zeros(150, 2)
        weight[first, 0] = weight[second, 0] = 3.0
        hidden = torch.tensor([[1.0, 0.0]] * 3, device=DEVICE)
        got = token_statistics(hidden, weight.to(DEVICE), top=4, backend="triton")
        others = [t for t in range(4) if t not in (first, second)][:2]
        assert got.token.tolist() == [first] * 3
        assert got.top_token[2].tolist() == [first, second, *others]
        assert not got.margin.any() and not got.gap.any()
    zeros = torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]], device=DEVICE)
    assert logits_statistics(zeros, top=3, backend="triton").top_token.tolist() == [[1, 2, 0]] * 2


@pytest.mark.parametrize("chosen", some([
    {"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "tempered": True},
    {"top_p": 0.9, "tempered": True}, {"temperature": 0.5}, {},
], 1))  # fmt: skip
def test_rows_that_allow_nothing_or_one(chosen: dict[str, Any]) -> None:
    logits = torch.randn(3, 130)
    logits[1] = -torch.inf
    logits[2, 1:] = -torch.inf
    if "temperature" in chosen:
        chosen = {**chosen, "noise_keys": keys(3)}
    options = on_device({**chosen, "top": 1, "select": torch.zeros(3, dtype=torch.int64)})
    got = logits_statistics(logits.to(DEVICE), backend="triton", **options)
    agree(got, logits_statistics(logits.to(DEVICE), backend="naive", **options))
    assert got.token[1:].tolist() == [0, 0] and got.logprob[1] == -torch.inf


def test_precision_near_probability_one() -> None:
    logits = torch.tensor([[30.0, 0.0, -1.0], [40.0, 0.0, -1.0]], device=DEVICE)
    agree(
        logits_statistics(logits, backend="triton"), logits_statistics(logits, backend="naive"),
        atol=0,
    )  # fmt: skip


def test_flat_rows_beyond_the_candidates_are_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    original = fused.plain.logits_statistics

    def spy(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(logits))
        return original(logits, *args, **kwargs)

    monkeypatch.setattr(fused.plain, "logits_statistics", spy)
    logits = torch.randn(4, 260) * 0.1
    logits[1, 7] = logits[3, 200] = 30.0  # narrow nuclei among wide ones
    chosen = on_device({"temperature": 0.9, "top_p": 0.8, "noise_keys": keys(4), "tempered": True})
    got = logits_statistics(logits.to(DEVICE), backend="triton", **chosen)
    agree(got, logits_statistics(logits.to(DEVICE), backend="naive", **chosen), rtol=1e-4)
    assert rows == [2]


@pytest.mark.slow
def test_equal_probabilities_at_the_border_of_the_nucleus() -> None:
    logits = torch.zeros(1, 100)
    logits[:, 10:14] = 9.0
    for top_p, top_k in [(0.5, 0), (0.49, 0), (0.6, 1)]:
        chosen = {"top_p": top_p, "top_k": top_k, "tempered": True, "select": torch.tensor([12])}
        options = on_device(chosen)
        agree(
            logits_statistics(logits.to(DEVICE), backend="triton", **options),
            logits_statistics(logits.to(DEVICE), backend="torch", **options),
        )


@pytest.mark.slow
def test_the_same_samples_as_torch() -> None:
    hidden, weight = torch.randn(12, 16), torch.randn(197, 16)
    for chosen in ({}, {"top_p": 0.9, "top_k": 4}):
        options = on_device({"temperature": 0.8, "noise_keys": keys(12), **chosen})
        a, b = (
            token_statistics(hidden.to(DEVICE), weight.to(DEVICE), backend=name, **options)
            for name in ("triton", "torch")
        )
        assert torch.equal(a.token, b.token)


def test_heads_that_must_be_called_and_strides() -> None:
    inner = nn.Linear(8, 90, bias=True).to(DEVICE)
    hidden = torch.randn(5, 16, device=DEVICE)[:, ::2]
    expected = token_statistics(hidden, inner, vocab_size=80, backend="naive")
    for head in (inner, lambda h: inner(h)):
        got = token_statistics(hidden, head, vocab_size=80, backend="triton")
        agree(got, expected, rtol=1e-4, atol=1e-5)
    wide = torch.randn(8, 90, device=DEVICE).T  # columns together instead of rows
    agree(
        token_statistics(hidden, wide, backend="triton"),
        token_statistics(hidden, wide, backend="naive"),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def test_no_rows_and_long_lists() -> None:
    weight = torch.randn(100, 8, device=DEVICE)
    got = token_statistics(torch.randn(0, 8, device=DEVICE), weight, top=2, backend="triton")
    assert got.token.shape == (0,) and got.top_token.shape == (0, 2)
    compare(torch.randn(2, 8), weight, top=50)
    compare(torch.randn(2, 8), weight[:15], top=20, tempered=True, top_k=3)
    compare(torch.randn(2, 8), weight[:40], top=20, top_p=0.7, temperature=1.0,
            noise_keys=keys(2))  # fmt: skip


def test_every_field_is_optional_but_two() -> None:
    got = logits_statistics(torch.randn(4, 30, device=DEVICE), needs=("gap",), backend="triton")
    assert {f for f in FIELDS if getattr(got, f) is not None} == {"token", "logprob", "gap"}


def test_kernels_are_launched_on_the_device_of_their_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton itself takes the present device, whatever it is given."""
    chosen: list[torch.Tensor] = []
    given = torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: chosen.append(x) or given(x))
    x = torch.randn(2, 4, device=DEVICE)
    logits_statistics(x, backend="triton")
    ones, slots = torch.ones(2, 4, device=DEVICE), torch.arange(2, device=DEVICE)
    rotate_scatter(x[None], x[None], x[None], ones, ones, slots, *2 * [x[None].clone()],
                   backend="triton")  # fmt: skip
    segments.folded(x, None, slots, slots, 1.0, 1.0, False)
    assert len(chosen) == 3 and all(one.device == x.device for one in chosen)


def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "interpreted", lambda: False)
    statistics._backend.cache_clear()  # it is chosen once
    with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
        logits_statistics(torch.randn(3, 5), backend="triton")
    statistics._backend.cache_clear()


@pytest.mark.slow
def test_everything_compiles_for_a_gpu() -> None:
    """Types, layouts and shared memory, checked on any machine; needs no GPU."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_all.py"))],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("compiled") >= 4


@pytest.mark.parametrize("noise", some([True, False], 1))
def test_classes_as_in_torch(noise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of one token, of fewer and of more than a block; ties; what is impossible."""
    monkeypatch.setattr(segments, "BLOCK", 16)
    rng = torch.Generator().manual_seed(3)
    of = torch.cat([torch.arange(4), torch.randint(-1, 5, (150,), generator=rng)])
    of = torch.cat([of, torch.full((9,), 5)]).numpy()
    x = torch.randn(5, len(of), generator=rng) * 8
    x[0, of == 2] = -torch.inf
    x[1, of == 1] = 1.5
    x[:, ::7] = -torch.inf
    noisy = torch.randn(x.shape, generator=rng).masked_fill(x == -torch.inf, -torch.inf)
    x, other = x.to(DEVICE), noisy.to(DEVICE) if noise else None
    cut = classes.TokenClasses(of, 6).cut(0, len(of), x.device)
    found = classes.Folded(*segments.folded(x, other, cut.columns, cut.first, 1.0, 0.7, noise))
    monkeypatch.setattr(classes, "find_spec", lambda name: None)  # torch, on a GPU, too
    wanted = classes.folded(x, other, cut, 1.0, 0.7, noise)
    assert torch.equal(found.best, wanted.best) and torch.equal(found.at, wanted.at)
    torch.testing.assert_close(found.total, wanted.total)
    assert (found.warm is None) == (wanted.warm is None)
    if found.warm is not None and wanted.warm is not None:
        torch.testing.assert_close(found.warm, wanted.warm)
