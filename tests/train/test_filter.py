"""Learn2PD's filter: what it is trained on, and that it learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dllm
from dllm.core.errors import ConfigError
from dllm.eval.tasks import TASKS
from dllm.samplers.learn2pd import apply_filter, filter_weights
from dllm.train.recipes.filter import save_filter, train_filter, trajectories


def test_trajectories_say_which_proposals_were_final() -> None:
    prompts = [e.prompt for e in TASKS["fact"].examples(3)]
    confidence, label, counts = trajectories(dllm.load("nano"), prompts, block_length=16)
    assert confidence.shape == label.shape == counts.shape
    assert ((confidence > 0) & (confidence <= 1 + 1e-6)).all()
    assert set(np.unique(label)) <= {0.0, 1.0}
    assert label[counts].mean() > 0.5  # the model knows its facts


def test_a_filter_learns_and_is_used(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0, 1, (400, 8)).astype(np.float32)
    label = (confidence > 0.5).astype(np.float32)
    weights, measured = train_filter(confidence, label, np.ones((400, 8), np.bool_), steps=300)
    assert measured["precision"] > 0.95
    file = tmp_path / "filter.npz"
    save_filter(weights, file)
    again = filter_weights(str(file))
    logits = apply_filter(again, np.array([0.95] * 4 + [0.05] * 4, np.float32))
    assert (logits[:4] > 0).all() and (logits[4:] < 0).all()
    out = dllm.generate("nano", "What is 4 + 5?", sampler=f"learn2pd(filter={str(file)!r})")
    assert out.text == "4 + 5 = 9."


def test_a_missing_filter_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="dllm train filter"):
        dllm.generate("nano", "What is 4 + 5?", sampler="learn2pd(filter='nowhere.npz')")
