"""Feed-forward layers: the same bits as transformers' own, whatever their products are."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Glm4MoeConfig, Qwen3MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from dllm.kernels.quantised import QuantisedLinear
from dllm.models.forwards import classes
from dllm.models.linears import pack_linears
from dllm.models.mlp import replace_feed_forward

WAYS = ("plain", "int8", "int4", "int8 and plain")


@pytest.mark.parametrize("name", classes("MLP"))
@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits(name: str, way: str) -> None:
    module, kind = name.rsplit(".", 1)
    config = SimpleNamespace(hidden_size=96, intermediate_size=160, hidden_act="silu",
                             mlp_bias=True)  # fmt: skip
    torch.manual_seed(0)
    layer: Any = getattr(import_module(module), kind)(config).to(torch.bfloat16)
    for part in {"plain": (), "int8 and plain": ("gate_proj",)}.get(way, ("gate_proj", "up_proj")):
        how = (4, 32) if way == "int4" else (8, 0)
        setattr(layer, part, QuantisedLinear.of(getattr(layer, part), *how))
    x = torch.randn(2, 7, 96).to(torch.bfloat16)
    with torch.inference_mode():
        before = layer(x)
        replace_feed_forward(nn.Sequential(layer))  # type: ignore[arg-type]
        assert "forward" in layer.__dict__
        assert torch.equal(layer(x), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [0, 1])
def test_a_row_of_a_mixture_does_not_depend_on_others(kind: int, dtype: torch.dtype) -> None:
    """Nor do widths have to be multiples of 16 bytes, as in PyTorch's grouped products."""
    config = (Qwen3MoeConfig, Glm4MoeConfig)[kind](
        hidden_size=75, moe_intermediate_size=45, num_experts=6, n_routed_experts=6, n_group=2,
        num_experts_per_tok=2, norm_topk_prob=True, experts_implementation="grouped_mm",
    )  # fmt: skip
    layer: Any = (Qwen3MoeSparseMoeBlock, Glm4MoeMoE)[kind](config)
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    layer, x = layer.to(dtype), torch.randn(1, 40, 75).to(dtype)
    with torch.inference_mode():
        layer.experts.config._experts_implementation = "eager"
        before = layer(x)
        layer.experts.config._experts_implementation = "grouped_mm"
        for change in (replace_feed_forward, pack_linears):
            change(nn.Sequential(layer))  # type: ignore[arg-type]
        whole = layer(x)
        for rows in (1, 2, 3, 7):
            assert torch.equal(torch.cat([layer(part) for part in x.split(rows, 1)], 1), whole)
    torch.testing.assert_close(whole, before, rtol=0.03, atol=64 * torch.finfo(dtype).eps)
