"""Canvases of DiffusionGemma's kind: the clean tokens from a canvas with uniform noise in it.

A row is read as when it is decoded: what stands before its canvas causally, the canvas as a whole.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dllm.models.attention import attending
from dllm.train.network import ATTENTION


class UniformDenoising(nn.Module):
    """Mean cross-entropy over a canvas per row, the noise of which is drawn with density 2t; end
    tokens after the first weigh ``tail_weight``.  Half of the batches are predicted twice, the
    second time conditioned on the first prediction (self-conditioning, arXiv 2208.04202).

    ``network`` is the decoder; ``noise_id``: what noise is (None: random ids)."""

    def __init__(self, network: Any, tail_weight: float, noise_id: int | None = None) -> None:
        super().__init__()
        self.network, self.tail_weight, self.noise_id = network, tail_weight, noise_id

    def forward(
        self, ids: torch.Tensor, answer: torch.Tensor, tail: torch.Tensor, seed: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """``loss`` of ``ids`` (B, L), where ``answer`` and ``tail`` (B, L) bool mark what has to be
        written and end tokens after the first."""
        generator = torch.Generator().manual_seed(int(seed))
        size, device = self.network.config.canvas_length, ids.device
        ids, answer, tail = ids.cpu(), answer.cpu(), tail.cpu()  # the same draws on every device
        ids, tail = F.pad(ids, (0, size), value=int(ids[0, -1])), F.pad(tail, (0, size), value=True)
        prompt = (~answer).sum(1)
        canvases = (answer & ~tail[:, :-size]).sum(1).sub(1) // size + 1  # with the first end token
        chosen = (torch.rand(len(ids), generator=generator) * canvases).long()
        start = prompt + chosen * size
        length = int(start.max()) + size
        ids, tail, place = ids[:, :length], tail[:, :length], torch.arange(length)
        canvas = (place >= start[:, None]) & (place < start[:, None] + size)
        ratio = torch.rand(len(ids), 1, generator=generator).sqrt()
        noisy = canvas & (torch.rand(ids.shape, generator=generator) < ratio)
        columns = self.network.config.text_config.vocab_size
        noise = torch.randint(columns, ids.shape, generator=generator)
        noise = noise if self.noise_id is None else torch.full_like(noise, self.noise_id)
        inputs = torch.where(noisy, noise, ids).to(device)
        ids, tail, start, canvas = (each.to(device) for each in (ids, tail, start, canvas))
        soft = None
        if torch.rand((), generator=generator) < 0.5:
            with torch.no_grad():
                logits = self._logits(inputs, start, canvas, None)
                soft = logits.softmax(-1) @ self.network.embed_tokens.weight.float()
        logits = self._logits(inputs, start, canvas, soft)
        weight = canvas * torch.where(tail, self.tail_weight, 1.0)
        losses = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
        return {"loss": (losses * weight).sum() / weight.sum()}

    def _logits(
        self, ids: torch.Tensor, start: torch.Tensor, canvas: torch.Tensor,
        soft: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Float logits (B, L, V).  Encoder and decoder share their layers, as their scalars are one
        in training."""
        decoder = self.network
        place = torch.arange(ids.shape[1], device=ids.device)
        causal = place[:, None] >= place
        seen = causal | (canvas[:, :, None] & (canvas[:, None, :] | causal))
        with attending(decoder, ATTENTION):
            plain = decoder.embed_tokens(ids)
            signal = torch.zeros_like(plain)
            if soft is not None:
                signal = soft * decoder.embed_tokens.embed_scale
            conditioned = decoder.self_conditioning(plain, signal)
            hidden = torch.where(canvas[..., None], conditioned, plain)
            kinds = decoder.text_config.layer_types
            angles = {kind: decoder.rotary_emb(hidden, place[None], kind) for kind in {*kinds}}
            for layer, kind in zip(decoder.layers, kinds, strict=True):
                hidden = layer(
                    hidden, position_embeddings=angles[kind], attention_mask=seen[:, None]
                )
            logits = F.linear(decoder.norm(hidden), decoder.embed_tokens.weight).float()
        cap = decoder.text_config.final_logit_softcapping
        bent: torch.Tensor = torch.tanh(logits / cap) * cap
        return bent
