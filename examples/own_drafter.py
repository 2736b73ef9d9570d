"""A small causal model of transformers drafts for a larger one: the classical set-up.

python examples/own_drafter.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

import dllm
from dllm.drafting.base import Budget, Draft, Drafter, Drafting, DraftRequest, chain
from dllm.models.forwards import CACHE  # "past_key_values" before transformers 5.24


@dataclass
class Assistant(Drafter):
    """A causal model of transformers that drafts token by token."""

    model: Any = None

    def open(self, request: DraftRequest) -> Drafting:
        return Assisting(self.model)


class Assisting(Drafting):
    def __init__(self, model: Any) -> None:
        self.model, self.cache = model, DynamicCache()
        self.fed: list[int] = []

    def propose(self, prefix: Any, budget: Budget) -> Draft:
        text, drafted, confidence = prefix.tolist(), [], []
        same = next(
            (i for i, (a, b) in enumerate(zip(self.fed, text, strict=False)) if a != b),
            min(len(self.fed), len(text) - 1),
        )
        self.cache.crop(same - len(self.fed))  # forget what the verifier rejected
        self.fed = text[:same]
        while len(drafted) < budget.length:
            fresh = (text + drafted)[len(self.fed) :]
            with torch.inference_mode():
                ids = torch.tensor([fresh], device=self.model.device)
                row = self.model(ids, **{CACHE: self.cache}).logits[0, -1]
            self.fed += fresh
            drafted.append(int(row.argmax()))
            confidence.append(float(row.softmax(-1).max()))
            if budget.chain_length(np.array(confidence)) < len(confidence):
                break  # the controller has enough
        length = budget.chain_length(np.array(confidence))
        return chain(drafted[:length], "assistant", np.array(confidence[:length]))


def main() -> None:
    small = dllm.load("nano-ar").hf  # your small model; here the verifier itself
    out = dllm.speculate("nano-ar", Assistant(small), "Compute 69 + 49.", max_new_tokens=32)
    print(out.text, out.footer(), sep="\n")


if __name__ == "__main__":
    main()
