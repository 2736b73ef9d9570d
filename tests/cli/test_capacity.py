"""Speed that `dllm doctor` predicts: arithmetic on shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dllm.cli.capacity import tokens_per_second

from .test_doctor import LLADA_8B


@pytest.fixture
def llada(tmp_path: Path) -> Path:
    folder = tmp_path / "LLaDA-8B-Instruct"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLADA_8B))
    return folder


def test_a_speed_is_predicted_in_every_precision(tmp_path: Path) -> None:
    """From config.json alone, before there are weights; more than a tenth and less than ten times
    what the shape's operations take at 100 billion a second."""
    from dllm.models.checkpoint import open_checkpoint

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "vocab_size": 49152, "max_position_embeddings": 2048, "mask_token_id": 5, "eos_token_id": 0,
        "dllm": {"family": "llada"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain, cached = tokens_per_second(open_checkpoint(tmp_path), "int8", 2048) or (0, 0)
    operations = 2 * 768 * 30 * (4 * 576**2 + 3 * 576 * 1536)
    expected = 4 / (operations / 100e9)
    assert expected / 10 < plain < 10 * expected and cached > 2 * plain
