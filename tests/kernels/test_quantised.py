"""Weights of 8 and 4 bits: near the weight, the same for a row alone, and back from a layout."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from dllm.kernels import quantised
from dllm.kernels.quantised import QuantisedEmbedding, QuantisedLinear

from ..thin import covering
from .filtered import logits_statistics, token_statistics

BITS = [(8, 0), (4, 32), (4, 128)]
DTYPES = [torch.float32, torch.bfloat16]


def layers(
    inputs: int, outputs: int, bits: int, group: int, dtype: torch.dtype, bias: bool = False
) -> tuple[nn.Linear, QuantisedLinear]:
    torch.manual_seed(inputs + outputs)
    plain = nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)
    return plain, QuantisedLinear.of(plain, bits, group)


@pytest.mark.parametrize(("bits", "group"), BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_weight_moves_by_more_than_half_a_step(
    bits: int, group: int, dtype: torch.dtype
) -> None:
    plain, rounded = layers(256, 96, bits, group, dtype)
    apart = (rounded.weight.float() - plain.weight.float()).abs().view(96, -1, group or 256)
    step = rounded.scale.float()[..., None]
    slack = plain.weight.abs().max().float() * 2**-8  # the restored weight and zero are rounded
    assert (apart <= step * 0.501 + slack).all()
    span = plain.weight.float().view(96, -1, group or 256)
    widest = 2 * span.abs().amax(2) / 254 if bits == 8 else (span.amax(2) - span.amin(2)) / 15
    assert (rounded.scale.float() <= widest * 1.01).all()  # no number of the range is wasted


@pytest.mark.parametrize(("way", "dtype", "bias"), covering(BITS, DTYPES, [False, True]))
def test_products_are_those_of_the_restored_weight(
    way: tuple[int, int], dtype: torch.dtype, bias: bool, kernels: str
) -> None:
    bits, group = way
    _, rounded = layers(512, 192, bits, group, dtype, bias)
    weight = rounded.weight.double()
    x = torch.randn(3, 7, 512).to(dtype)
    with torch.inference_mode():
        result = rounded(x)
        twin = nn.functional.linear(x.double(), weight, None)
        twin = twin if rounded.bias is None else twin + rounded.bias.double()
    assert result.dtype == dtype and result.shape == (3, 7, 192)
    apart = (result.double() - twin).norm() / twin.norm()
    assert apart < (0.012 if bits == 8 or kernels == "compiled" else 0.006)  # inputs in 8 bits


@pytest.mark.skipif(not quantised.whole_products(), reason="no exact products of whole numbers")
def test_sums_of_whole_numbers_are_exact_at_the_limits() -> None:
    numbers = torch.where(torch.arange(64 * 4096).view(64, -1) % 3 == 0, -127, 127).to(torch.int8)
    layer = quantised.Int8(numbers, torch.ones(64, 1))
    x = torch.full((5, 4096), 255, dtype=torch.uint8)
    x[1], x[2] = 0, 128
    expected = (x.double() - 128) @ numbers.double().T
    assert torch.equal(layer.multiply(x).double(), expected)


def test_weight_only_products_are_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a float32 network: in float32 PyTorch's kernel is not vectorised."""
    monkeypatch.setattr(quantised, "whole_products", lambda: False)
    monkeypatch.setattr(quantised, "library", lambda: None)
    _, rounded = layers(256, 96, 8, 0, torch.float32)
    x = torch.randn(5, 256)
    with torch.inference_mode():
        result = rounded(x)
        assert result.dtype == torch.float32
        assert torch.equal(result, rounded(x.bfloat16()).float())


def test_sums_of_more_inputs_than_32_bits_hold_are_not_of_whole_numbers() -> None:
    """At the limit of 65,793 inputs the largest sum is below 2^31; beyond it floats are summed."""
    most = quantised.MOST_INPUTS
    assert most * 255 * 128 < 2**31 <= (most + 1) * 255 * 128
    inputs = most + quantised.EVEN - most % quantised.EVEN
    plain = nn.Linear(inputs, 16, bias=False).requires_grad_(False)
    plain.weight.fill_(1.0)
    rounded = QuantisedLinear.of(plain, 8)
    with torch.inference_mode():
        result = rounded(torch.ones(3, inputs))
    torch.testing.assert_close(result, torch.full((3, 16), float(inputs)), rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("way", "kernel", "dtype"), covering(BITS, ["own", "weight only", "compiled"], DTYPES)
)
def test_a_row_does_not_depend_on_the_others(
    way: tuple[int, int], kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    bits, group = way
    if kernel == "weight only":
        monkeypatch.setattr(quantised, "whole_products", lambda: False)
    if kernel == "compiled":
        request.getfixturevalue("compiled")
    _, rounded = layers(384, 208, bits, group, dtype)
    x = torch.randn(200, 384).to(dtype)
    with torch.inference_mode():
        together = rounded(x)
        for rows in (*range(1, 9), 16, 17, 33, 65, 199):
            for first in {0, 1, 200 - rows}:
                here = slice(first, first + rows)
                assert torch.equal(rounded(x[here]), together[here]), (rows, first)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("way", "outputs"), covering(BITS, [96, quantised.ROWS + 112]))
def test_files_and_copies_see_the_numbers_that_were_laid_out(
    way: tuple[int, int], outputs: int
) -> None:
    bits, group = way
    _, rounded = layers(128, outputs, bits, group, torch.float32, bias=True)
    before = {name: value.clone() for name, value in rounded.state_dict().items()}
    x = torch.randn(4, 128)
    with torch.inference_mode():
        result = rounded(x)
    assert rounded.numbers.numel() == 0  # held once
    for twin in (rounded, copy.deepcopy(rounded), pickle.loads(pickle.dumps(rounded))):
        after: dict[str, Any] = twin.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
        with torch.inference_mode():
            assert torch.equal(twin(x), result)
    other = layers(128, outputs, bits, group, torch.float32, bias=True)[1]
    other.load_state_dict(before)
    rounded.load_state_dict({name: value.flip(0) for name, value in before.items()})
    with torch.inference_mode():
        assert torch.equal(rounded(x), result.flip(1)) and torch.equal(other(x), result)
    rounded.load_state_dict(before)
    rounded.to(torch.bfloat16)
    with torch.inference_mode():
        cast = rounded(x.bfloat16())
    assert cast.dtype == torch.bfloat16
    torch.testing.assert_close(cast.float(), result, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_layers_are_near_plain_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 64).to(dtype)
    x[0, 1] = 0
    for n in (64, 96, 32):
        plain = nn.Linear(64, n, bias=n > 64).to(dtype)
        with torch.inference_mode():
            y = QuantisedLinear.of(plain, 8)(x)
            assert y.dtype == dtype and (y - plain(x)).abs().max() < 0.05


def test_statistics_call_the_hooks_of_a_head() -> None:
    head, x = layers(64, 32, 8, 0, torch.float32)[1], torch.randn(3, 64)
    head.register_forward_hook(lambda *given: 2 * given[2])
    with torch.inference_mode():
        proposed = token_statistics(x, head, top=32).top_logprob
        expected = logits_statistics(head(x), top=32).top_logprob
    torch.testing.assert_close(proposed, expected)


@pytest.mark.usefixtures("kernels")
def test_zeros_and_what_is_not_finite() -> None:
    rounded = QuantisedLinear.of(nn.Linear(64, 32, bias=False).requires_grad_(False), 8)
    x = torch.randn(3, 64)
    x[0], x[1, 5] = 0, torch.nan
    with torch.inference_mode():
        result = rounded(x)
    assert not result[0].any() and result[1].isnan().all() and result[2].isfinite().all()
    with torch.inference_mode():
        assert rounded(x[:0]).shape == (0, 32)


def test_gradients_reach_the_inputs_through_the_restored_weight() -> None:
    _, rounded = layers(64, 32, 8, 0, torch.float32)
    x = torch.randn(3, 64, requires_grad=True)
    rounded(x).sum().backward()
    torch.testing.assert_close(x.grad, rounded.weight.sum(0).expand(3, -1))


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("vocabulary", [None, quantised.ROWS + 17])
def test_statistics_of_a_rounded_head(top_k: int, vocabulary: int | None) -> None:
    """Those of its logits, and the same bits for a row alone."""
    _, head = layers(64, 2 * quantised.ROWS + 112, 8, 0, torch.bfloat16)
    hidden = torch.randn(40, 64).bfloat16() * 3
    how: dict[str, Any] = {"top": 3, "top_k": top_k, "needs": ("entropy", "margin")}
    with torch.inference_mode():
        result = token_statistics(hidden, head, vocab_size=vocabulary, **how)
        expected = logits_statistics(head(hidden)[:, :vocabulary], **how)
        alone = token_statistics(hidden[9:10], head, vocab_size=vocabulary, **how)
    for (name, a), (_, b), (_, c) in zip(
        result.columns(), expected.columns(), alone.columns(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=name)
        assert torch.equal(a[9:10], c), name


def test_an_embedding_by_its_rows() -> None:
    plain = nn.Embedding(50, 64).requires_grad_(False)
    rounded = QuantisedEmbedding.of(plain)
    ids = torch.tensor([[0, 7], [49, 7]])
    assert torch.equal(rounded(ids), rounded.weight[ids])
    torch.testing.assert_close(rounded(ids), plain(ids), rtol=0, atol=0.02)
