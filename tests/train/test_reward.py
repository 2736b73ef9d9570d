"""Rewards: what an answer is worth, the loss against one that is written out, and runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dllm
from dllm.errors import ConfigError
from dllm.train.loop import Schedule
from dllm.train.network import Network
from dllm.train.objectives.reward import Reward, RewardSettings, advantages, reward_loss, states
from dllm.train.recipes.reward import OnPolicy, Reinforcement, train
from dllm.train.trajectories import Question

from ..drafting.drafters.test_self import MASK, tiny

pytestmark = pytest.mark.filterwarnings("default")


def test_accuracy_and_speed_are_normalised_apart_and_idle_groups_left_out() -> None:
    right = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    speed = torch.tensor([[1.0, 1, 3, 3], [1, 2, 3, 4], [2, 2.005, 2, 2], [40, 20, 40, 20]])
    result, kept = advantages(right, speed, RewardSettings(speed=0.5))
    assert kept.tolist() == [True, False, False, True]
    a = math.sqrt(3)  # of one right answer in four
    sums = [a - 0.5, -1 / a - 0.5, -1 / a + 0.5, -1 / a + 0.5, 1.5, 0.5, -0.5, -1.5]
    scale = math.sqrt(sum(x * x for x in sums) / 8)  # their mean is 0
    expected = torch.tensor([x / scale for x in sums]).view(2, 4)
    torch.testing.assert_close(result[kept], expected)
    assert not result[~kept].any()


def test_the_loss_is_the_one_written_out() -> None:
    own = torch.tensor([-0.1, -2.0, -0.7, -1.2, -0.4], requires_grad=True)
    reference = torch.tensor([-0.3, -1.0, -0.7, -1.5, -0.2])
    which, advantage = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([1.5, -0.5, -1.0])
    right = torch.tensor([True, False, True])
    settings = RewardSettings(kl=0.3, nll=0.2)
    loss = reward_loss(own, reference, which, advantage, right, settings)
    apart = [-0.2, 1.0, 0.0, -0.3, 0.2]
    divergence = sum(math.exp(d) - d - 1 for d in apart) / 5
    assert loss.item() == pytest.approx(
        -(1.5 - 0.5 - 1.0) / 3 + 0.3 * divergence + 0.2 * (0.1 + 2.0 + 1.2 + 0.4) / 4
    )
    loss.backward()
    policy = [-1.5 / 2 / 3, -1.5 / 2 / 3, 0.5 / 3, 1.0 / 2 / 3, 1.0 / 2 / 3]
    likelihood = [-0.2 / 4, -0.2 / 4, 0.0, -0.2 / 4, -0.2 / 4]
    pulled = [0.3 / 5 * (1 - math.exp(d)) for d in apart]
    torch.testing.assert_close(
        own.grad,
        torch.tensor([a + b + c for a, b, c in zip(policy, likelihood, pulled, strict=True)]),
    )


def test_a_state_is_the_text_before_a_step() -> None:
    batch = states([([9, 8, 5, 6, 7, 1], 2, [1, 0, 1, -1], 3), ([9, 5, 6], 1, [0, 0], 1)])
    assert batch["ids"].tolist() == [[9, 8, 5, 6, 7, 1]] * 2 + [[9, 5, 6, 0, 0, 0]]
    assert batch["masked"].int().tolist() == [
        [0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 1, 1], [0, 1, 1, 0, 0, 0],
    ]  # fmt: skip
    assert batch["learnt"].int().tolist() == [
        [0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0],
    ]  # fmt: skip
    assert batch["valid"].sum(1).tolist() == [6, 6, 3]
    assert batch["text"].tolist() == [0, 0, 1]


class Fine(Question):
    """A question that every answer is right for."""

    def right(self, text: str) -> bool:
        return True


def decoder(**facts: Any) -> dllm.DiffusionModel:
    model = dllm.load(tiny(), mask_token_id=MASK, eos_token_id=1, **facts)
    return replace(model, generation_defaults={"max_new_tokens": 12, "block_length": 4})


@pytest.mark.parametrize("rows", [64, 3])
@pytest.mark.parametrize(
    "facts", [{"family": "llada"}, {"family": "a2d_llama", "block_length": 4}],
    ids=["bidirectional", "blocks"],
)  # fmt: skip
def test_tokens_are_judged_as_they_were_drawn(
    facts: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probabilities of the loss are those that the engine recorded, however many states
    go through the network at once."""
    settings = RewardSettings(samples=4, rows=rows, spread=0)
    recipe = Reinforcement(settings, Schedule(1), questions=2)
    model, prompts = decoder(**facts), [[7, 9, 11, 5, 8], [40, 21]]
    asked = [Fine(prompt) for prompt in prompts]
    policy, seen = OnPolicy(Network(model), recipe, asked), list[torch.Tensor]()
    own = Reward._log_p

    def spy(self: Reward, *chunk: torch.Tensor, frozen: bool = False) -> torch.Tensor:
        result = own(self, *chunk, frozen=frozen)
        seen.append(result) if not frozen else None
        return result

    monkeypatch.setattr(Reward, "_log_p", spy)
    batch = policy.answers(asked, 0)
    assert batch is not None
    loss = policy.objective(**batch)["loss"]
    results = dllm.generate(model, [q.prompt for q in asked for _ in range(4)],
                            temperature=1.0, seed=0, sampler="threshold(0.9)")  # fmt: skip
    recorded = [x for result in results for x in result.logprobs.tolist()]
    assert len(batch["right"]) == 8  # nothing was left out
    assert sorted(torch.cat(seen).tolist()) == pytest.approx(sorted(recorded), abs=1e-4)
    loss.backward()
    gradients = [p.grad for p in policy.network.hf.parameters()]
    assert all(g is not None and g.isfinite().all() for g in gradients)
    assert sum(float(g.abs().sum()) for g in gradients if g is not None) > 0


@pytest.mark.slow
def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    model = decoder(family="llada")
    asked = [Fine(list(range(5 + i, 12))) for i in range(4)]
    recipe = Reinforcement(
        RewardSettings(samples=4, spread=0), Schedule(2, 1e-2, 0, "constant", 0, save_every=1),
        questions=2, sampler="threshold(0.3)",
    )  # fmt: skip
    whole: Any = train(model, recipe, tmp_path / "whole", asked)
    (tmp_path / "parts").mkdir()
    for name in ("recipe.json", "checkpoints/checkpoint-1"):
        source, goal = tmp_path / "whole" / name, tmp_path / "parts" / name
        goal.parent.mkdir(exist_ok=True)
        source.rename(goal)
    parts: Any = train(model, recipe, tmp_path / "parts", asked)
    one, other = (run.model.network.hf.state_dict() for run in (whole, parts))
    before: Any = model.hf.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], before["lm_head.weight"])


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="edit decides otherwise than the network draws"):
        Reinforcement(sampler="edit")
    with pytest.raises(ConfigError, match="samples is at least 2"):
        RewardSettings(samples=1)
    with pytest.raises(ConfigError, match="0 prompts are too few for 16"):
        train(dllm.load("nano"), Reinforcement(), tmp_path, [])
