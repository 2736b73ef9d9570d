"""The gated conversion: many blocks of masks in one forward, and a run that learns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.errors import ConfigError, UnknownNameError
from dllm.models.adapters import LINEARS, gate_adapter
from dllm.train.dflash.card import curve
from dllm.train.loop import resume
from dllm.train.objectives.gated import MaskBlocks
from dllm.train.recipes.convert import Conversion, Schedule, finish, start
from dllm.train.trajectories import task_questions

from ..drafting.drafters.test_self import tiny

pytestmark = pytest.mark.filterwarnings("default")
MASK = 3


def test_blocks_in_one_forward_are_what_decoding_computes() -> None:
    """Against a forward of the decided tokens and the masks, one block at a time."""
    from peft import LoraConfig

    hf: Any = tiny().eval()
    hf.requires_grad_(False)
    hf.add_adapter(LoraConfig(r=4, target_modules=list(LINEARS), init_lora_weights=False))
    blocks = MaskBlocks(hf, gate_adapter(hf, MASK), 3)
    ids, anchors = torch.randint(5, 60, (2, 20)), torch.tensor([[3, 7, 15], [5, 6, 19]])
    states = blocks.read(ids)
    together = blocks(ids, states, anchors)
    assert together.requires_grad and not states.requires_grad
    for b, row in enumerate(anchors.tolist()):
        for n, anchor in enumerate(row):
            whole = torch.cat([ids[b, :anchor], torch.full((3,), MASK)])[None]
            alone = hf.base_model(input_ids=whole).last_hidden_state[0, -3:]
            torch.testing.assert_close(together[b, n], alone, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of nano-ar to generated tasks."""
    model, file = dllm.load("nano-ar"), tmp_path_factory.mktemp("data") / "answers.jsonl"
    prompts = [q.prompt for q in task_questions(64, 0, ("sum", "story1", "copy"))]
    results = dllm.speculate(model, None, prompts, max_new_tokens=32)
    with file.open("w") as out:
        for result in results:
            ids = result.sequences[: result.prompt_length].tolist() + result.tokens
            out.write(json.dumps({"ids": ids, "answer": result.prompt_length}) + "\n")
    return file


@pytest.mark.slow
def test_a_run_learns_and_the_model_drafts_for_itself(answers: Path, tmp_path: Path) -> None:
    model = dllm.load("nano-ar")
    recipe = Conversion(
        masks=2, rank=8, held_out=6, evaluated=8,
        schedule=Schedule(steps=12, rows=8, anchors=8, warmup=2, learning_rate=5e-3,
                          evaluate_every=12),
    )  # fmt: skip
    run, split = start(model, [answers], recipe, tmp_path)
    resume(run)
    points = curve(run.state.log_history, 64)
    assert points[-1]["tokens_per_forward"] > 1.1
    finish(run, model, recipe, split, tmp_path / "adapter")
    assert (
        f"| {points[-1]['tokens_per_forward']:.2f} |"
        in (tmp_path / "adapter" / "README.md").read_text()
    )
    held = [np.asarray(a.ids[: a.start]) for a in split.held[:4]]
    both = dllm.load("nano-ar", adapter=tmp_path / "adapter")
    own = dllm.speculate(both, "self(masks=2)", held, max_new_tokens=24, controller="whole")
    plain = dllm.speculate(dllm.load("nano-ar"), None, held, max_new_tokens=24)
    assert [r.tokens for r in own] == [r.tokens for r in plain]
    assert sum(len(r.tokens) for r in own) > 1.05 * sum(r.nfe for r in own)


def test_a_diffusion_model_is_not_converted(answers: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="diffusion model already"):
        start(dllm.load("nano"), [answers], Conversion(), tmp_path)


def test_a_run_has_a_batch_for_each_of_its_parts_and_keeps_to_its_recipe(
    answers: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnknownNameError, match="unknown schedule 'cosin'; did you mean 'cosine'"):
        Schedule(schedule="cosin")
    model = dllm.load("nano-ar")
    recipe = Conversion(held_out=6, schedule=Schedule(steps=3, accumulate=4, rows=2))
    run, _ = start(model, [answers], recipe, tmp_path)
    assert len(run.train_dataset) == 12  # else batches come again
    with pytest.raises(ConfigError, match="another recipe, with another masks"):
        start(model, [answers], replace(recipe, masks=5), tmp_path)
