"""What a drafter is worth: held-out answers of the verifier, drafted again.

The answers are greedy, so accepting is comparing: no verifier runs.  A walk through an answer
drafts at its first token, goes on behind what was right and one more token, as the loop does.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .data import Answer, HiddenStates, collate
from .objective import Trainee


@torch.no_grad()
def acceptance(
    trainee: Trainee, answers: Sequence[Answer], states: HiddenStates, rows: int,
    walking: bool = True,
) -> tuple[float, list[float]]:  # fmt: skip
    """Drafts at every place of ``answers``, ``rows`` answers at a time, and walks through them:
    tokens per forward of the verifier (its first one, which reads the prompt, left out), and how
    often the k-th draft of a round was accepted (K,).  With a head that looks at the token before
    these are those of its walk."""
    device = trainee.head.device
    tokens = rounds = 0
    reached = torch.zeros(trainee.blocks.drafts)
    for first in range(0, len(answers), rows):
        part = answers[first : first + rows]
        batch = collate(part, [range(a.start, len(a.ids) - 1) for a in part], states)
        ids = batch["ids"].to(device)
        read = batch["states"].to(device) if "states" in batch else trainee.reader.read(ids)
        drafts = drafts_at(trainee, ids, read, batch["anchors"].to(device), walking)
        for answer, row in zip(part, drafts.cpu(), strict=True):
            accepted = walk(matches(answer, row))
            tokens, rounds = tokens + answer.tokens - 1, rounds + len(accepted)
            for count in accepted:
                reached[:count] += 1
    return tokens / max(1, rounds), (reached / max(1, rounds)).tolist()


def measure(trainee: Any, answers: Sequence[Answer], states: HiddenStates) -> dict[str, float]:
    """`acceptance` as the metrics of a run."""
    per_forward, reached = acceptance(trainee, answers, states, 4)
    metrics = {"tokens_per_forward": per_forward}
    if trainee.walk is not None:
        metrics["without_head"], _ = acceptance(trainee, answers, states, 4, walking=False)
    return metrics | {f"reached_{k}": share for k, share in enumerate(reached, 1)}


def drafts_at(
    trainee: Trainee, ids: torch.Tensor, states: torch.Tensor, anchors: torch.Tensor,
    walking: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Most probable tokens (B, N, drafts), over the whole vocabulary; with ``walking`` and a
    head that looks at the token before, each given the one before."""
    anchors = anchors.clamp_min(0)
    hidden = trainee.blocks(ids, states[..., : -trainee.head.shape[1]], anchors)
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
    parts = torch.split(hidden.reshape(-1, hidden.shape[-1]).to(head.dtype), 512)
    return torch.cat([(part @ head.T).max(-1).indices for part in parts]).view(hidden.shape[:-1])


def matches(answer: Answer, drafts: torch.Tensor) -> torch.Tensor:
    """(places, K) bool: where a draft (N, K) is the answer's token."""
    ids = torch.tensor(answer.ids)
    anchors = torch.arange(answer.start, len(ids) - 1)
    at = anchors[:, None] + torch.arange(1, drafts.shape[1] + 1)
    right: torch.Tensor = ids[at.clamp_max(len(ids) - 1)] == drafts[: len(anchors)]
    return right & (at < len(ids))


def walk(hits: torch.Tensor) -> list[int]:
    """Accepted drafts of every round."""
    runs = hits.long().cumprod(1).sum(1).tolist()
    place, accepted = 0, []
    while place < len(runs):
        accepted.append(runs[place])
        place += runs[place] + 1
    return accepted
