"""Labels for the accept rule ``pivot``: which drafted tokens change the outcome of a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..models import DiffusionModel
from ..request.prompts import encode
from .accept.lossy import pivot_features
from .accept.rows import Rows
from .api import speculate
from .base import AcceptRule, Array, Draft, Outcome


@dataclass
class Refusals(AcceptRule):
    """Keeps what ``keyed`` keeps and remembers what it refused: the ids up to and with the refused
    token, and its features."""

    seen: list[tuple[list[int], Array]] = field(default_factory=list)

    name = "refusals"

    def judge(self, rows: Rows, draft: Draft) -> Outcome:
        for node, token in enumerate(draft.tokens.tolist()):
            own = rows.keyed(node - 1)
            if token != own:
                ids = [*rows.prefix.tolist(), *draft.tokens[: node + 1].tolist()]
                self.seen.append((ids, pivot_features(rows, node - 1, token)))
                return Outcome(list(range(node)), own)
        return Outcome(list(range(len(draft))), rows.keyed(len(draft) - 1))


def label_pivots(
    verifier: DiffusionModel, drafter: Any, prompts: Sequence[str],
    checks: Sequence[Callable[[str], bool]], *, max_new_tokens: int = 64, **how: Any,
) -> tuple[list[Array], list[bool]]:  # fmt: skip
    """Features (4,) of drafted tokens that the verifier refused, and whether each is pivotal.

    Where the paper asks a language model to judge, this tries it out: the text goes on with the
    refused token in place of the verifier's, greedily to its end, and the token is pivotal if what
    ``checks`` says of the answer differs from what it says of the verifier's own.  One check per
    prompt, from text to right or wrong.  ``how``: more arguments of `dllm.speculate`.  Both lists
    go into `fit_pivot`.
    """
    tokenizer: Any = verifier.tokenizer
    features: list[Array] = []
    pivotal: list[bool] = []
    for prompt, check in zip(prompts, checks, strict=True):
        rule, ids = Refusals(), encode(verifier, prompt).tolist()
        own = speculate(verifier, drafter, ids, rule=rule, max_new_tokens=max_new_tokens, **how)
        ends = set(np.atleast_1d(verifier.facts.stop_token_ids).tolist())
        right = check(own.text)
        for tried, numbers in rule.seen:
            room, tail = len(ids) + max_new_tokens - len(tried), []
            if room > 0 and tried[-1] not in ends:
                tail = speculate(verifier, None, tried, max_new_tokens=room).tokens
            answer = tokenizer.decode([*tried[len(ids) :], *tail], skip_special_tokens=True)
            features.append(numbers)
            pivotal.append(check(answer) != right)
    return features, pivotal
