"""Raw logits equal those of the official implementations."""

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dllm.models import DiffusionModel, load

from .conftest import goldens_dir

# float32 rounds each sum by 6e-8 of what is summed, and the order of sums is the processor's own
# (AVX2, AVX-512): over all layers that reaches this.  Measured with AVX2: 3e-5 and 8.5e-5; the
# machine of the recordings has 0.0 with sdpa.
TOLERANCE = {"sdpa": 1e-4, "eager": 1.2e-4}


def recorded() -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """Fields of each input of each checkpoint that is at hand, by their names; the repository
    holds one of a family, `DLLM_GOLDENS` may hold others."""
    result: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    for path in sorted((goldens_dir() / "forward").glob("*.safetensors")):
        for key, value in load_file(path).items():
            model, name, field = key.split(".")
            # Those that read a canvas beside a text are in tests/models/test_diffusion_gemma.py.
            if (goldens_dir() / model).is_dir() and not model.startswith("dgemma"):
                result.setdefault((model, name), {})[field] = value
    return result


RECORDED = recorded()


@cache
def loaded(name: str, attention: str, block_length: int | None) -> DiffusionModel:
    own = {} if block_length is None else {"block_length": block_length}
    return load(goldens_dir() / name, attn_implementation=attention, **own)


@pytest.mark.parametrize("attention", sorted(TOLERANCE))
@pytest.mark.parametrize(("name", "which"), RECORDED)
def test_logits_equal_the_official_ones(name: str, which: str, attention: str) -> None:
    inputs = dict(RECORDED[name, which])
    expected, blocks = inputs.pop("logits"), inputs.pop("block_length", None)
    model = loaded(name, attention, None if blocks is None else int(blocks))
    with torch.inference_mode():
        logits = model.hf(**inputs).logits
    kept = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    # Experts are summed in another order than in the official network.
    tolerance = TOLERANCE["eager" if blocks is not None else attention]
    assert (logits - expected)[kept].abs().max() <= tolerance


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_padding_changes_nothing(goldens: Path, family: str) -> None:
    model = load(goldens / f"{family}-tiny")
    recorded = load_file(goldens / "forward" / f"{family}_forward.safetensors")
    key = f"{family}-tiny.d_left_padded."
    ids, mask = recorded[key + "input_ids"], recorded[key + "attention_mask"].bool()
    positions = {"position_ids": recorded[key + "position_ids"]} if family == "dream" else {}
    with torch.inference_mode():
        padded = model.hf(ids, attention_mask=mask, **positions).logits
        for row in range(len(ids)):
            alone = model.hf(ids[row : row + 1, mask[row]]).logits[0]
            torch.testing.assert_close(padded[row, mask[row]], alone, rtol=0, atol=2e-4)
