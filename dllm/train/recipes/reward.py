"""Runs on rewards: the network answers, is told what the answers are worth, and answers again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from ...api import generate
from ...errors import ConfigError
from ...models import DiffusionModel
from ...samplers import compose
from ..batches import arranged
from ..loop import Loop, Schedule, resume, same_recipe
from ..network import Network
from ..objectives.reward import Reward, RewardSettings, advantages, states
from ..trajectories import Question, entry
from .distill import Asked, measured


@dataclass(frozen=True)
class Reinforcement:
    """``questions`` prompts per step, each answered as often as ``objective`` says, with
    ``sampler``; ``rank`` of the adapter, 0 trains all weights."""

    objective: RewardSettings = field(default_factory=RewardSettings)
    schedule: Schedule = field(default_factory=lambda: Schedule(100, 1e-5, 10, "constant"))
    questions: int = 16
    rank: int = 0
    sampler: str = "threshold(0.9)"

    def __post_init__(self) -> None:
        for part in compose(self.sampler).parts:
            if part.role in ("transform", "reviser", "explorer", "length"):
                raise ConfigError(
                    f"{part.name} decides otherwise than the network draws, so that tokens have no "
                    "probability to learn: use a sampler without it, such as threshold"
                )


class OnPolicy(nn.Module):
    """Answers the questions of a step as the network is now, and learns from them.  Batches name
    the step, so that a run that was stopped goes on with the answers it would have drawn."""

    def __init__(self, network: Network, recipe: Reinforcement, questions: Asked) -> None:
        super().__init__()
        self.objective, self.recipe = Reward(network, recipe.objective), recipe
        self.questions = questions

    @property
    def network(self) -> Network:
        return self.objective.network

    def forward(self, step: torch.Tensor) -> dict[str, torch.Tensor]:
        """``loss`` of the answers of a step; 0 where nothing can be learnt from them."""
        chosen = arranged([1] * len(self.questions), self.recipe.questions,
                          self.recipe.schedule.seed, int(step))  # fmt: skip
        batch = self.answers([self.questions[i] for i in chosen], int(step))
        if batch is None:
            trained = [p for p in self.network.hf.parameters() if p.requires_grad]
            return {"loss": sum((p.sum() * 0.0 for p in trained), torch.zeros(()))}
        device = self.network.model.device
        return self.objective(**{k: v.to(device) for k, v in batch.items()})  # type: ignore[no-any-return]

    def answers(self, questions: Asked, step: int) -> dict[str, torch.Tensor] | None:
        """What `Reward` takes; None where all questions are left out."""
        settings, hf = self.recipe.objective, self.network.hf
        prompts = [q.prompt for q in questions for _ in range(settings.samples)]
        hf.train(False)
        with torch.autocast(self.network.model.device.type, enabled=False):
            results = generate(
                self.network.snapshot(), prompts, sampler=self.recipe.sampler, trace=True,
                temperature=settings.temperature, seed=self.recipe.schedule.seed + step,
            )  # fmt: skip
        hf.train()
        said = [questions[i // settings.samples].right(r.text) for i, r in enumerate(results)]
        shape = len(questions), settings.samples
        right = torch.tensor([bool(one) for one in said])
        speed = torch.tensor([r.tokens_per_forward for r in results])
        advantage, kept = advantages(right.view(shape), speed.view(shape), settings)
        if not kept.any():
            return None
        here = kept.repeat_interleave(settings.samples)
        texts = []
        for result, keep in zip(results, here.tolist(), strict=True):
            if keep:
                text = entry(result)
                texts.append((text["ids"], text["answer"], text["order"], len(result.tokens)))
        return states(texts) | {"advantage": advantage.flatten()[here], "right": right[here]}


def train(
    model: DiffusionModel, recipe: Reinforcement, folder: Path, questions: Sequence[Question], *,
    held_out: Asked = (), say: Callable[[str], None] | None = None,
    gradient_checkpointing: bool = False,
) -> Loop:  # fmt: skip
    """A run in ``folder``, where a stopped one goes on.  ``questions`` have a ``prompt`` and say
    by ``right(text)`` whether a text answers it: `trajectories.Question`, or your own."""
    if len(questions) < recipe.questions:
        raise ConfigError(f"{len(questions)} prompts are too few for {recipe.questions} per step")
    same_recipe(folder, recipe)
    torch.manual_seed(recipe.schedule.seed)  # an adapter begins with random weights
    network, schedule = Network(model, recipe.rank), recipe.schedule
    if gradient_checkpointing:
        network.hf.gradient_checkpointing_enable()
    steps = [{"step": torch.tensor(i)} for i in range(schedule.steps * schedule.accumulate)]
    run = measured(OnPolicy(network, recipe, questions), steps, recipe, folder / "checkpoints",
                   held_out, say)  # fmt: skip
    resume(run)
    network.hf.train(False)
    return run
