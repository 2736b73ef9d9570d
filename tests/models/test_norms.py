"""RMSNorm layers: the same bits as transformers' own."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from dllm.models.forwards import classes
from dllm.models.norms import shorten_norms


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", classes("RMSNorm"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shortened_norms_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    module, kind = name.rsplit(".", 1)
    norm: Any = getattr(import_module(module), kind)(192, 1e-5).to(dtype)
    torch.manual_seed(0)
    nn.init.normal_(norm.weight, 1, 0.3)
    given = [scale * torch.randn(shape).to(dtype)
             for shape in ((1, 1, 192), (1, 4, 192), (3, 17, 192))
             for scale in (1e-3, 1, 50)]  # fmt: skip
    with torch.inference_mode():
        before = [norm(x) for x in given]
        shorten_norms(nn.Sequential(norm))  # type: ignore[arg-type]
        assert "forward" in norm.__dict__
        assert all(torch.equal(norm(x), y) for x, y in zip(given, before, strict=True))
    x = given[1].clone().requires_grad_()
    norm(x).float().sum().backward()
    assert x.grad is not None and norm.weight.grad is not None
