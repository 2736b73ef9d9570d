"""DEER's alignment: examples as the paper describes them, and a run that raises acceptance."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import dllm
from dllm.core.errors import ConfigError
from dllm.train.recipes.deer import (
    Alignment,
    Pair,
    align,
    begin,
    save_aligned,
    stage1_example,
    stage2_example,
    teacher_answers,
)
from dllm.train.trajectories import task_questions

from ..drafting.conftest import make_verifier

MASK, MARKER, END = 90, 91, 0
PAIR: Pair = ([50, 51, 52], [*range(1, 30), END])


@pytest.mark.parametrize("make", [stage1_example, stage2_example])
def test_examples_are_text_and_masks_with_the_marker(make: object) -> None:
    recipe, rng = Alignment(window=8, far=12), random.Random(0)
    text, beyond = PAIR[0] + PAIR[1], 0
    for _ in range(200):
        example = make(PAIR, recipe, rng, MASK, MARKER)  # type: ignore[operator]
        masks = example.ids.count(MASK)
        seen = len(example.ids) - masks - 1
        learnt = text[seen : seen + masks]
        assert example.ids == [*text[:seen], *[MASK] * masks, MARKER]
        assert 3 <= seen < len(text)
        behind = masks - len(learnt) + 1
        assert example.targets == [-100] * seen + learnt + [-100] * behind
        assert all((w > 0) == (t >= 0) for w, t in zip(example.weights, example.targets,
                                                       strict=True))  # fmt: skip
        assert sum(example.weights) == pytest.approx(1.0)
        assert masks <= (12 if make is stage2_example else 16)
        beyond += len(learnt) < masks
    assert 20 < beyond < 180


def test_stage_2_weighs_the_border_most() -> None:
    recipe, rng = Alignment(far=12, alpha=1.5), random.Random(4)
    example = stage2_example(PAIR, recipe, rng, MASK, MARKER)
    weights = [w for w in example.weights if w]
    assert len(weights) > 2
    assert np.allclose(np.array(weights[:-1]) / weights[1:], 1.5)


@pytest.mark.slow
def test_the_answers_are_the_verifiers(tmp_path: Path) -> None:
    verifier, asked = make_verifier("full"), task_questions(5, 0)
    pairs = teacher_answers(verifier, asked, tmp_path / "answers.jsonl", max_new_tokens=10)
    result = {tuple(prompt): answer for prompt, answer in pairs}
    for question in asked:
        plain = dllm.speculate(verifier, None, question.prompt, max_new_tokens=10)
        asked = plain.sequences[: plain.prompt_length].tolist()
        assert result[tuple(asked)] == plain.tokens


def test_a_folder_knows_its_prompts_and_its_models(
    tiny: dllm.DiffusionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, asked, file = make_verifier("full"), task_questions(3, 0), tmp_path / "answers.jsonl"
    pairs = teacher_answers(verifier, asked, file, 4)
    monkeypatch.setattr("dllm.train.trajectories.greedy", None)  # they are answered already
    assert teacher_answers(verifier, asked, file, 4) == pairs
    with pytest.raises(ConfigError, match="answers other prompts"):
        teacher_answers(verifier, asked[::-1], file, 4)
    begin(tiny, Alignment(), tmp_path, "one")
    with pytest.raises(ConfigError, match="with another base"):
        begin(tiny, Alignment(), tmp_path, "other")
    with pytest.raises(ConfigError, match="no mask token"):
        begin(verifier, Alignment(), tmp_path / "causal")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="deer trains in one process"):
        begin(tiny, Alignment(), tmp_path / "causal")
    assert not (tmp_path / "causal").exists()


@pytest.mark.slow
def test_alignment_raises_acceptance(tiny: dllm.DiffusionModel, tmp_path: Path) -> None:
    """On a text that is always the same, a few steps are enough to draft all of it."""
    torch.manual_seed(0)
    pairs: list[Pair] = [([5, 6, 7], [20, 30, 40, 21, 31, 41, 22, 32])]
    recipe = Alignment(
        stage1_steps=100,
        stage2_steps=30,
        stage1_lr=5e-3,
        stage2_lr=2e-3,
        rows=8,
        window=4,
        far=4,
    )
    before = tiny.hf.state_dict()["lm_head.weight"].clone()
    *_, model = align(tiny, pairs, recipe, tmp_path / "run")
    assert torch.equal(before, tiny.hf.state_dict()["lm_head.weight"])
    save_aligned(model, recipe, tmp_path / "aligned")
    drafter = dllm.DiffusionDrafter(tmp_path / "aligned", search="argmax", window=4)
    assert drafter.end_marker == recipe.marker_for(tiny)
    from dllm.drafting.base import Budget, DraftRequest

    drafting = drafter.open(DraftRequest(np.array([5, 6, 7]), tiny.facts.vocab_size, (), 60))
    draft = drafting.propose(np.array([5, 6, 7, 20]), Budget(4, 4))
    assert draft.tokens.tolist() == [30, 40, 21, 31]
    draft = drafting.propose(np.array([5, 6, 7, 20, 30, 40]), Budget(2, 2))  # reuses the first four
    assert draft.tokens.tolist() == [21, 31]
