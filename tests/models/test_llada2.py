"""LLaDA2: its files.  tests/golden/test_forward.py has the logits of the official code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dllm


def test_it_is_read_saved_and_read_again(checkpoints: Path, tmp_path: Path) -> None:
    model = dllm.load(checkpoints / "llada2-tiny")
    facts = model.facts
    assert (facts.mask_token_id, facts.eos_token_id, facts.logit_shift) == (255, 250, 0)
    assert (facts.mask_kind, facts.block_length) == ("block_causal", 32)
    assert model.family.name == "llada2"
    model.save_pretrained(tmp_path / "saved")
    again = dllm.load(tmp_path / "saved")
    assert again.facts == facts
    for name, weight in model.hf.state_dict().items():
        assert torch.equal(weight, again.hf.state_dict()[name]), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drop": ("num_experts",)}, "lacks num_experts"),
        ({"score_function": "softmax"}, "score_function"),
    ],
)
def test_other_configurations_are_refused(
    copy: Callable[..., Path], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(dllm.CheckpointError, match=words):
        dllm.load(copy("llada2-tiny", **change))
