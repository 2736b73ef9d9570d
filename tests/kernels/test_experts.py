"""Experts: the bits of their single products, whatever rows, threads and copies there are."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DiffusionGemmaTextConfig, Glm4MoeConfig, Qwen3MoeConfig
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaTextExperts
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from dllm.kernels.cpu.layers import Groups
from dllm.kernels.cpu.products import Weight
from dllm.kernels.linear import Packed, linear
from dllm.kernels.quantised import QuantisedExperts
from dllm.models import linears
from dllm.models.mlp import replace_feed_forward

from ..thin import covering

FAMILIES: dict[str, Any] = {
    "qwen3": (Qwen3MoeExperts, Qwen3MoeConfig),
    "glm4": (Glm4MoeExperts, Glm4MoeConfig),
    "gemma": (DiffusionGemmaTextExperts, DiffusionGemmaTextConfig),
}
DTYPES = [torch.float32, torch.bfloat16]
COUNT, CHOSEN = 7, 3


def experts(family: str, dtype: torch.dtype, width: int = 96, inner: int = 64) -> Any:
    kind, config = FAMILIES[family]
    of = config(hidden_size=width, moe_intermediate_size=inner, num_experts=COUNT,
                n_routed_experts=COUNT, experts_implementation="eager")  # fmt: skip
    torch.manual_seed(0)
    layer = kind(of)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    replace_feed_forward(nn.Sequential(layer))  # type: ignore[arg-type]
    return layer.to(dtype).eval()


def pack(layer: Any, copy: bool = True) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linears, "room_for", lambda size: copy)
        linears.pack_linears(nn.Sequential(layer))  # type: ignore[arg-type]


def inputs(rows: int, dtype: torch.dtype, width: int = 96) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows)
    weights, chosen = torch.rand(rows, COUNT).topk(CHOSEN)
    chosen[: rows // 2] %= 2  # some have many rows, and one has none
    chosen[chosen == 5] = 6
    return torch.randn(rows, width).to(dtype), chosen, weights.to(dtype)


def one_by_one(layer: Any, x: torch.Tensor, chosen: torch.Tensor, weights: Any) -> torch.Tensor:
    """The naive twin: every row with every expert of its own, by products of linear layers."""
    result = []
    for row, of, by in zip(x, chosen.tolist(), weights, strict=True):
        total = torch.zeros(len(row))
        for expert, weight in zip(of, by, strict=True):
            first, second = layer.gate_up_proj[expert], layer.down_proj[expert]
            if isinstance(first, torch.Tensor):
                gate, up = linear(row[None], first, None, Packed()).chunk(2, -1)
                done = linear(layer.act_fn(gate) * up, second, None, Packed())
            else:
                gate, up = first(row[None]).chunk(2, -1)
                done = second(layer.act_fn(gate) * up)
            total += (done[0] * weight).float()
        result.append(total.to(x.dtype))
    return torch.stack(result)


@pytest.mark.parametrize(
    ("family", "dtype", "way"), covering([*FAMILIES], DTYPES, ["copy", "plain", "int8", "int4"])
)
def test_rows_have_the_bits_of_single_products(
    kernels: str, family: str, dtype: torch.dtype, way: str
) -> None:
    """Whoever is beside them, and with any number of threads."""
    layer, before = experts(family, dtype), torch.get_num_threads()
    x, chosen, weights = inputs(40, dtype)
    with torch.inference_mode():
        plain = layer(x, chosen, weights)
        if way in ("int8", "int4"):
            layer = QuantisedExperts.of(layer, int(way[3]), 32)
        else:
            pack(layer, copy=way == "copy")
        whole = layer(x, chosen, weights)
        assert torch.equal(whole, one_by_one(layer, x, chosen, weights)) or (
            way == "int4" and kernels == "plain"  # PyTorch's kernel does not promise that
        )
        off = 0.2 if way == "int4" else 0.03
        assert (whole - plain).norm() < off * plain.norm()
        for rows in (1, 2, 3, 7, 33) if (way, kernels) != ("int4", "plain") else ():
            pieces = zip(*(each.split(rows) for each in (x, chosen, weights)), strict=True)
            assert torch.equal(torch.cat([layer(*piece) for piece in pieces]), whole)
        try:
            for threads in (2, 3, 8) if kernels == "compiled" else ():
                torch.set_num_threads(threads)
                assert torch.equal(layer(x, chosen, weights), whole)
                assert torch.equal(layer(x[:1], chosen[:1], weights[:1]), whole[:1])
        finally:
            torch.set_num_threads(before)
        assert layer(x[:0], chosen[:0], weights[:0]).shape == (0, 96)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_widths_and_dtypes_that_no_kernel_takes(kernels: str, dtype: torch.dtype) -> None:
    layer, given = experts("qwen3", dtype, 75, 45), inputs(9, dtype, 75)
    with torch.inference_mode():
        before = layer(*given)
        pack(layer)
        torch.testing.assert_close(layer(*given), before, rtol=0.03, atol=0.03)


def test_changed_trained_and_copied_experts(kernels: str) -> None:
    layer, given = experts("qwen3", torch.float32), inputs(20, torch.float32)
    twin = experts("qwen3", torch.float32)
    pack(layer)
    for each in (layer, twin):
        each(*given).square().sum().backward()
    for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        whole = layer(*given)
        for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(same(*given), whole)
            same.down_proj.zero_()
            assert not same(*given).any()
            assert torch.equal(layer(*given), whole)
        layer.down_proj.mul_(2)
        assert torch.equal(layer(*given), 2 * whole)
        layer.to(torch.float64)
        exact = layer(given[0].double(), *given[1:])
        torch.testing.assert_close(exact.float(), 2 * whole, rtol=1e-4, atol=1e-4)


def test_rounded_experts_can_be_copied_and_cast(kernels: str) -> None:
    layer = QuantisedExperts.of(experts("qwen3", torch.float32), 8)
    x, chosen, weights = inputs(20, torch.float32)
    with torch.inference_mode():
        whole = layer(x, chosen, weights)
        for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(same(x, chosen, weights), whole)
        layer.to(torch.bfloat16).to(torch.float32)  # laid out anew
        assert torch.equal(layer(x, chosen, weights), whole)
        half = layer(x.half(), chosen, weights.half())
        assert half.dtype == torch.float16 and (half - whole).norm() < 0.02 * whole.norm()
    grown = x.clone().requires_grad_()
    layer(grown, chosen, weights).sum().backward()
    assert grown.grad is not None and grown.grad.any()


@pytest.mark.usefixtures("compiled")
def test_experts_that_there_are_not_are_refused() -> None:
    groups = Groups([Weight(torch.randn(32, 16)) for _ in range(3)])
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match="from 0 to 2"):
            groups(torch.randn(2, 16), torch.tensor([0, wrong]), 1)
