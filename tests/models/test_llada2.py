"""LLaDA2: its files.  tests/golden/test_forward.py has the logits of the official code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dllm
from dllm import samplers
from dllm.core.config import GenerationConfig
from dllm.engine.recipe import MaskedRecipe, RowOptions
from dllm.kernels.statistics import Filters


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


@pytest.mark.parametrize(("chosen", "normed"), [(2, True), (1, False)])
def test_weights_of_several_experts_add_up_whatever_a_field_says(
    copy: Callable[..., Path], chosen: int, normed: bool
) -> None:
    """Official code divides by their sum where there are several, and reads no field for it."""
    model = dllm.load(copy("llada2-tiny", num_experts_per_tok=chosen, norm_topk_prob=not normed))
    assert model.hf.config.norm_topk_prob == normed


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_a_scaled_rotation_is_read_under_both_names(copy: Callable[..., Path], field: str) -> None:
    """The official class writes the second with transformers 5."""
    scaled = {"rope_type": "linear", "factor": 2.0}
    rotary: Any = dllm.load(copy("llada2-tiny", **{field: scaled})).backbone.rotary_emb
    expected = 600000 ** -(torch.arange(0, 8, 2) / 8) / 2  # of 8 in 16 numbers of a head
    torch.testing.assert_close(rotary.inv_freq, expected)


def test_top_k_comes_before_top_p_as_in_its_code(checkpoints: Path) -> None:
    config = GenerationConfig(temperature=0.7, top_p=0.9, top_k=5)
    recipe = MaskedRecipe(samplers.compose("threshold"), config=config)
    for name, k_first in (("llada2-tiny", True), ("dream-tiny", False)):
        options = RowOptions.of(recipe, dllm.load(checkpoints / name))
        assert options.filters == Filters(0.7, 0.9, 5, k_first=k_first)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drop": ("num_experts",)}, "lacks num_experts"),
        ({"score_function": "softmax"}, "score_function"),
        # LLaDA2.2, of the same class: experts are chosen for blocks, tokens delete and insert
        ({"expert_capacity": 48, "block_size": 32}, "expert_capacity=48"),
        ({"delete_token_id": 156930, "split_token_id": 156931}, "delete_token_id=156930"),
    ],
)
def test_other_configurations_are_refused(
    copy: Callable[..., Path], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(dllm.CheckpointError, match=words):
        dllm.load(copy("llada2-tiny", **change))
