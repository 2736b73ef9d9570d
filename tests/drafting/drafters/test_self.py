"""A verifier that drafts for itself: lossless, whatever its masks say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dllm
from dllm.drafting.base import Draft
from dllm.drafting.drafters.self import SelfDrafter
from dllm.errors import CheckpointError, ConfigError
from dllm.models.adapters import LINEARS
from dllm.train.recipes.convert import save_gated

from ...thin import covering

pytestmark = pytest.mark.filterwarnings("default")
MASK = 3
PROMPTS = [np.arange(5, 12), np.arange(20, 45), np.array([7, 9])]


def tiny(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.3, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    ))  # fmt: skip


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that says something, untrained."""
    from peft import LoraConfig

    hf, folder = tiny(), tmp_path_factory.mktemp("adapter")
    hf.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=list(LINEARS),
                              init_lora_weights=False))  # fmt: skip
    save_gated(hf, folder, MASK)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny().save_pretrained(folder)
    return folder


def load(base: Path, adapter: Path | None, dtype: str = "float32") -> dllm.DiffusionModel:
    more: dict[str, Any] = {} if adapter is None else {"adapter": adapter}
    return dllm.load(base, dtype=dtype, **more)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decided_tokens_compute_what_the_base_does(base: Path, adapter: Path, dtype: str) -> None:
    alone, both = load(base, None, dtype), load(base, adapter, dtype)
    assert both.facts.mask_token_id == MASK and both.family.name == "gated"
    ids = torch.arange(5, 25)[None]
    assert torch.equal(both.hf(ids).logits, alone.hf(ids).logits)
    masked = torch.cat([ids, torch.full((1, 3), MASK)], 1)
    logits, without = both.hf(masked).logits, alone.hf(masked).logits
    assert torch.equal(logits[:, :20], without[:, :20])
    assert not torch.allclose(logits[:, 20:], without[:, 20:], atol=0.1)


@pytest.mark.parametrize(("masks", "temperature"), covering([1, 3], [0.0, 1.0]))
def test_self_drafting_changes_nothing(
    base: Path, adapter: Path, masks: int, temperature: float
) -> None:
    how: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
    plain = dllm.speculate(load(base, None), None, PROMPTS, **how)
    own = dllm.speculate(
        load(base, adapter), SelfDrafter(masks), PROMPTS, controller="whole", **how
    )
    assert [r.tokens for r in own] == [r.tokens for r in plain]
    for result in own:
        first, *later = result.rounds
        assert first.drafted == 0
        assert all(r.drafted <= masks and r.source == "self" for r in later[:-1])
        assert later[0].drafted == masks
        # what every round fed: the last token, the drafts, and masks behind each of them
        assert all(r.emitted == r.accepted + 1 for r in result.rounds[:-1])


def test_the_next_draft_is_what_masks_behind_the_text_say(base: Path, adapter: Path) -> None:
    """One forward of the whole text with masks in place of what follows the last accepted token."""
    model, seen = load(base, adapter), []

    class Spy(SelfDrafter):
        def propose_all(self, work: Any) -> list[Draft]:
            drafts = super().propose_all(work)
            seen.append((work[0][1], drafts[0].proposed.tokens))
            return drafts

    dllm.speculate(model, Spy(3), PROMPTS[0], controller="whole", max_new_tokens=20)
    assert len(seen) > 5
    for prefix, drafted in seen[1:-3]:
        ids = torch.tensor([[*prefix[:-1].tolist(), MASK, MASK, MASK]])
        logits = model.hf(ids).logits[0, -3:]
        logits[:, MASK] = -torch.inf
        assert drafted.tolist() == logits.argmax(-1).tolist()


def test_probes_are_never_proposed() -> None:
    draft = Draft(np.array([8, 9, 3, 3]), np.array([-1, 0, -1, 1]), probes=2)
    assert draft.proposed.is_chain and draft.proposed.tokens.tolist() == [8, 9]
    assert Draft(np.array([8])).proposed.tokens.tolist() == [8]


def test_what_cannot_draft_for_itself_says_why(base: Path, adapter: Path) -> None:
    with pytest.raises(ConfigError, match="fills in masks behind decided tokens"):
        dllm.speculate(load(base, None), "self", PROMPTS[0])
    with pytest.raises(ConfigError, match="at least 1"):
        SelfDrafter(0)
    with pytest.raises(ConfigError, match="acts on masks only"):
        dllm.load(tiny(), adapter=adapter, merge_adapter=True)
    with pytest.raises(CheckpointError, match="there is no folder"):
        dllm.load(tiny(), adapter=adapter / "nowhere")


def test_it_is_a_diffusion_model_too(base: Path, adapter: Path) -> None:
    model = load(base, adapter)
    for cache in ("none", "wedlm"):
        result = dllm.generate(model, PROMPTS, sampler="wedlm", cache=cache, max_new_tokens=12,
                               block_length=12)  # fmt: skip
        assert all(MASK not in r.sequences[r.prompt_length :].tolist() for r in result)
    first = [r.tokens[0] for r in result]
    plain = dllm.speculate(load(base, None), None, PROMPTS, max_new_tokens=1)
    assert first == [r.tokens[0] for r in plain]  # the first token is the base model's
