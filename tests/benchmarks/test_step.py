"""When a step counts as slower than it was, and that the script measures at all."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dllm

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "step", raising=False)
    import step as module

    return module


def case(products: float, roof: float, rows: int = 32) -> dict[str, Any]:
    known = {"dtype": "float32", "threads": 1, "rows": rows, "kernels": "PyTorch"}
    return {**known, "products": products, "roof": roof}


def test_a_share_that_has_fallen_is_named(step: Any) -> None:
    before = [case(0.8, 0.5)]
    assert step.fallen([case(0.7, 0.45)], before) == []
    (found,) = step.fallen([case(0.8, 0.4)], before)
    assert "roof 0.40 of a step, 0.50 when it was written" in found
    assert len(step.fallen([case(0.1, 0.1)], before)) == 2
    assert step.fallen([case(0.1, 0.1, rows=8)], before) == []  # never measured: nothing is known


def test_shares_of_a_small_network(step: Any) -> None:
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    model = dllm.load(LlamaForCausalLM(config), family="llada", mask_token_id=1, eos_token_id=0)
    found = step.measure(step.Step(model, 8), step.roof(torch.float32), 2, 1)
    assert found["milliseconds"] > 0 and found["roof_gflops"] > 0
    assert 0 < found["products"] < 1.5 and 0 < found["roof"] < 1.5
