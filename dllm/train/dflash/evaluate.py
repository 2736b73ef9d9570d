"""What a drafter is worth: held-out answers of the verifier, drafted again.

The answers are greedy, so accepting is comparing: no verifier runs.  A walk through an answer
drafts at its first token, goes on behind what was right and one more token, as the loop does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .data import Answer, HiddenStates, collate
from .objective import Trainee


@dataclass(frozen=True)
class Acceptance:
    """``per_forward``: tokens per forward of the verifier (its first one, which reads the prompt,
    left out); ``reached`` (K,): how often the k-th draft of a round was accepted; ``right`` (K,):
    how often it was right, over all places of the answers; ``per_answer``: tokens per forward of
    each answer.  With a head that looks at the token before these are those of its walk."""

    per_forward: float
    reached: list[float]
    right: list[float]
    per_answer: list[float]


@torch.no_grad()
def acceptance(
    trainee: Trainee,
    answers: Sequence[Answer],
    states: HiddenStates,
    rows: int,
    walking: bool = True,
) -> Acceptance:
    """Drafts at every place of ``answers``, ``rows`` answers at a time, and walks through them."""
    device = trainee.head.device
    size = trainee.blocks.drafts
    tokens = rounds = 0
    reached, right, seen = torch.zeros(size), torch.zeros(size), torch.zeros(size)
    per_answer = []
    for first in range(0, len(answers), rows):
        part = answers[first : first + rows]
        batch = collate(part, [range(a.start, len(a.ids) - 1) for a in part], states)
        ids = batch["ids"].to(device)
        read = batch["states"].to(device) if "states" in batch else trainee.reader.read(ids)
        drafts = drafts_at(trainee, ids, read, batch["anchors"].to(device), walking)
        for answer, row in zip(part, drafts.cpu(), strict=True):
            hits = matches(answer, row)
            right += (hits > 0).sum(0)
            seen += (hits >= 0).sum(0)
            accepted = walk(hits)
            tokens, rounds = tokens + sum(accepted) + len(accepted), rounds + len(accepted)
            per_answer.append(1 + sum(accepted) / max(1, len(accepted)))
            for count in accepted:
                reached[:count] += 1
    return Acceptance(
        tokens / max(1, rounds), (reached / max(1, rounds)).tolist(), (right / seen).tolist(),
        per_answer,
    )  # fmt: skip


def measure(trainee: Any, answers: Sequence[Answer], states: HiddenStates) -> dict[str, float]:
    """`acceptance` as the metrics of a run."""
    got = acceptance(trainee, answers, states, 4)
    metrics = {"tokens_per_forward": got.per_forward}
    if trainee.walk is not None:
        alone = acceptance(trainee, answers, states, 4, walking=False)
        metrics["without_head"] = alone.per_forward
    for k in range(len(got.reached)):
        metrics[f"reached_{k + 1}"], metrics[f"right_{k + 1}"] = got.reached[k], got.right[k]
    return metrics


def drafts_at(
    trainee: Trainee, ids: torch.Tensor, states: torch.Tensor, anchors: torch.Tensor,
    walking: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Most probable tokens (B, N, drafts), over the whole vocabulary; with ``walking`` and a
    head that looks at the token before, each given the one before."""
    width = trainee.head.shape[1]
    anchors = anchors.clamp_min(0)
    hidden = trainee.blocks(ids, states[..., :-width], anchors)
    if trainee.walk is None or not walking:
        return _best(hidden, trainee.head)
    tokens, drafts = ids.gather(1, anchors), []
    for k in range(hidden.shape[2]):
        own, known = hidden[:, :, k], F.embedding(tokens, trainee.blocks.embedding)
        tokens = _best(trainee.walk(own, known), trainee.head)
        drafts.append(tokens)
    return torch.stack(drafts, 2)


def _best(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """The rows of ``head`` with the largest logits under ``hidden``."""
    parts = hidden.reshape(-1, hidden.shape[-1]).to(head.dtype).split(512)
    return torch.cat([(part @ head.T).max(-1).indices for part in parts]).view(hidden.shape[:-1])


def matches(answer: Answer, drafts: torch.Tensor) -> torch.Tensor:
    """(places, K): 1 where a draft (N, K) is the answer's token, 0 where not, -1
    beyond its end."""
    ids = torch.tensor(answer.ids)
    anchors = torch.arange(answer.start, len(ids) - 1)
    at = anchors[:, None] + torch.arange(1, drafts.shape[1] + 1)
    inside = at < len(ids)
    hit = ids[at.clamp_max(len(ids) - 1)] == drafts[: len(anchors)]
    return torch.where(inside, hit.long(), -1)


def walk(hits: torch.Tensor) -> list[int]:
    """Accepted drafts of every round."""
    runs = (hits == 1).long().cumprod(1).sum(1).tolist()
    place, accepted = 0, []
    while place < len(runs):
        accepted.append(runs[place])
        place += runs[place] + 1
    return accepted
