"""Accuracy of a model on the generated tasks, on held-out prompts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..api import generate
from ..eval.tasks import TASKS
from ..models import DiffusionModel
from ..prompts import encode

ROWS = 64  # prompts decoded together


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
        texts: list[str] = []
        for i in range(0, n, ROWS):
            texts += _answers(model, prompts[i : i + ROWS], how)
        right = [TASKS[name].check(e, text) for e, text in zip(examples, texts, strict=True)]
        result[name] = sum(right) / n
    return result


def _answers(model: DiffusionModel, prompts: list[str], how: dict[str, Any]) -> list[str]:
    if model.facts.mask_token_id is not None:
        return [result.text for result in generate(model, prompts, **how)]
    assert model.tokenizer is not None
    texts = []
    for prompt in prompts:
        ids = torch.from_numpy(encode(model, prompt))[None]
        hf: Any = model.hf
        out = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False)
        new = out[0, ids.shape[1] :].tolist()
        texts.append(str(model.tokenizer.decode(new, skip_special_tokens=True)))
    return texts
