"""Accuracy of a model on the generated tasks, on held-out prompts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..api import generate
from ..drafting.api import speculate
from ..eval.tasks import TASKS
from ..models import DiffusionModel
from .data import CANVAS


def accuracy(
    model: DiffusionModel, n: int = 100, tasks: Iterable[str] = TASKS, seed: int = 0, **how: Any
) -> dict[str, float]:
    """Share of ``n`` held-out prompts answered correctly, per task.

    ``how``: arguments of `dllm.generate`; the default is one token per step.  An autoregressive
    model continues greedily.
    """
    how = how or {"sampler": "llada"}
    result = {}
    for name in tasks:
        examples = TASKS[name].examples(n, seed)
        prompts = [example.prompt for example in examples]
        if model.facts.mask_token_id is None:
            answers: list[Any] = speculate(model, None, prompts, max_new_tokens=CANVAS)
        else:
            answers = generate(model, prompts, **how)
        right = [TASKS[name].check(e, a.text) for e, a in zip(examples, answers, strict=True)]
        result[name] = sum(right) / n
    return result
