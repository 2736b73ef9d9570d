"""What a step minimises: a batch of answers in, one number out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import MuseGlimmerAssistantModel

from ...core.errors import ConfigError
from ...drafting.dflash.drafter import head_without_bias
from .loss import FrozenHeadLoss, decay_weights, dpace_weights, sampled_rows
from .model import BlockDrafter

LOSSES = ("dpace", "decay")
EPS = 1e-6


@dataclass(frozen=True)
class Objective:
    """``loss``: how drafts are weighted by place, "dpace" or "decay" (with ``gamma``); ``soft``:
    share of the verifier's distribution in the target, the rest is the token it wrote;
    ``head_rows`` most frequent answer tokens and ``random_rows`` others make the head of a step;
    ``chunk``: rows whose logits exist at a time; ``markov``: rank of a Markov head that is trained
    beside the drafter, 0 for none."""

    loss: str = "dpace"
    gamma: float = 4.0
    soft: float = 0.5
    head_rows: int = 6144
    random_rows: int = 1024
    chunk: int = 1024
    markov: int = 0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ConfigError(f"the loss is 'dpace' or 'decay', not {self.loss!r}")
        if not 0 <= self.soft <= 1:
            raise ConfigError(f"soft is a share between 0 and 1, not {self.soft}")


class Reader:
    """What the verifier's layers say of a text."""

    def __init__(self, verifier: Any, layers: Sequence[int]) -> None:
        self.verifier, self.layers = verifier, list(layers)
        self.device = verifier.get_input_embeddings().weight.device

    @torch.no_grad()
    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states behind the target layers and the normed last one, (B, S, (layers + 1) * H),
        of a batch padded on the right, where padding has no influence on what stands before."""
        out = self.verifier.get_decoder()(
            input_ids=ids, output_hidden_states=[i + 1 for i in self.layers], use_cache=False
        )
        states = [out.hidden_states[i + 1] for i in self.layers]
        return torch.cat([*states, out.last_hidden_state], -1)


class MarkovProjection(nn.Module):
    """DSpark's head without a gate, h + W2 W1 a for the token before a.

    The published Markov head (arXiv 2607.05147) learns two tables of the size of the vocabulary,
    one for the token before and one for the token that follows.  Here the tables are projections of
    what the verifier has learnt already: the first of its embedding, the second of its head.  A
    small run can learn these, they take no room in a checkpoint, and adding to the logits is the
    same as adding to the hidden state.
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.project_in = nn.Linear(width, rank, bias=False)
        self.project_out = nn.Linear(rank, width, bias=False)
        nn.init.normal_(self.project_in.weight, std=width**-0.5)
        nn.init.normal_(self.project_out.weight, std=1e-3)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Hidden states (..., H) that know the token before, by its embedding (..., H)."""
        known = F.rms_norm(previous.to(hidden.dtype), hidden.shape[-1:], eps=EPS)
        out: torch.Tensor = self.project_out(self.project_in(known))
        return hidden + out


@torch.no_grad()
def shaping(verifier: Any) -> tuple[float, float | None]:
    """What a network does to the logits of its head: a factor (Granite, Cohere), and a soft cap
    behind it (Gemma 2)."""
    cap = getattr(verifier.config.get_text_config(), "final_logit_softcapping", None)
    head, ids = verifier.get_output_embeddings(), torch.arange(8)[None]
    ids = ids.to(head.weight.device)
    plain = head(verifier.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state).float()
    logits = verifier(input_ids=ids, use_cache=False).logits.float()
    if cap is not None:
        logits = cap * torch.atanh(logits / cap)
    return float((logits / plain).nanmedian()), cap


class Trainee(nn.Module):
    """A ``drafter`` for the network ``verifier``: its hidden states at many places of a text, with
    everything frozen around them, the verifier's embedding and head and, without kept hidden
    states, what reads them.  ``common``: ids that are in the head of every step."""

    def __init__(
        self, drafter: MuseGlimmerAssistantModel, verifier: Any, objective: Objective,
        common: torch.Tensor,
    ) -> None:  # fmt: skip
        super().__init__()
        embedding, head = verifier.get_input_embeddings(), head_without_bias(verifier).weight
        scale = float(getattr(embedding, "embed_scale", 1.0))
        self.blocks = BlockDrafter(drafter, embedding.weight.detach(), scale)
        self.objective, rank = objective, objective.markov
        self.shaping = shaping(verifier)
        self.head: torch.Tensor
        self.common: torch.Tensor
        self.register_buffer("head", head.detach(), persistent=False)
        self.register_buffer("common", common, persistent=False)
        self.walk = MarkovProjection(head.shape[1], rank) if rank else None
        self.reader = Reader(verifier, drafter.config.target_layer_ids or [])  # not saved

    def forward(
        self, ids: torch.Tensor, length: torch.Tensor, anchors: torch.Tensor, seed: torch.Tensor,
        states: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """``loss`` of a batch as `data.collate` makes it."""
        states = self.reader.read(ids) if states is None else states
        width = self.head.shape[1]
        hidden = self.blocks(ids, states[..., :-width], anchors.clamp_min(0))
        places = anchors[..., None] + torch.arange(1, hidden.shape[2] + 1, device=ids.device)
        counted = (anchors[..., None] >= 0) & (places < length[:, None, None])
        labels = torch.where(counted, ids.gather(1, places.flatten(1).clamp_max(ids.shape[1] - 1))
                             .view_as(places), 0)  # fmt: skip
        generator = torch.Generator().manual_seed(int(seed))
        rows, index = sampled_rows(
            labels[counted], self.common, len(self.head), self.objective.random_rows, generator
        )
        batch = torch.arange(len(ids), device=ids.device)[:, None, None].expand_as(places)
        teacher = None
        if self.objective.soft > 0:
            teacher = states[batch[counted], places[counted] - 1, -width:]
        drafted = hidden[counted]
        total = self._under_head(drafted, rows, index, teacher, counted)
        if self.walk is not None:
            before = ids[batch[counted], places[counted] - 1]
            corrected = self.walk(drafted, F.embedding(before, self.blocks.embedding))
            total = total + self._under_head(corrected, rows, index, teacher, counted)
        return {"loss": total}

    def _under_head(
        self, states: torch.Tensor, rows: torch.Tensor, index: torch.Tensor,
        teacher: torch.Tensor | None, counted: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Mean loss of ``states`` (n, H), which are those ``counted``, weighted by place."""
        losses, q = FrozenHeadLoss.apply(  # type: ignore[no-untyped-call]
            states, self.head[rows], index, teacher, self.objective.soft, self.objective.chunk,
            *self.shaping,
        )  # fmt: skip
        counted = counted.flatten(0, 1)
        if self.objective.loss == "decay":
            weights = decay_weights(counted, self.objective.gamma)
        else:
            table = torch.zeros_like(counted, dtype=torch.float32)
            weights = dpace_weights(table.masked_scatter(counted, q.detach()), counted)
        return cast(torch.Tensor, (losses * weights[counted]).sum() / weights.sum())
