"""The device half of a step: jobs in, one forward, a few numbers per position out.

It owns what lives on the device between steps: keys and values, static graphs, the layer hook.
It knows nothing of how positions are chosen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..cache import Cache
from ..canvas import FloatArray, IntArray
from ..config import GenerationConfig
from ..errors import ConfigError, OutOfMemoryError
from ..kernels.divergence import divergence, log_probabilities
from ..kernels.statistics import TokenStatistics, logprobs_of, token_statistics
from ..models import DiffusionModel
from ..samplers import Prediction, Sampler
from .graphs import Static
from .kv import KVBuffer
from .layers import LayerHook
from .packing import Job, Packed, noise_keys, pack

Predictions = tuple[Prediction, Prediction | None]  # of a job's targets, of its shadow positions


class Forward:
    """One forward for all jobs of a step, and the statistics of the positions they ask for.

    ``ban_stops`` keeps stop ids from being proposed at all, e.g. when filling holes in a text.
    """

    def __init__(
        self,
        model: DiffusionModel,
        sampler: Sampler,
        config: GenerationConfig,
        ban_stops: bool = False,
    ) -> None:
        self.model, self.sampler, self.config = model, sampler, config
        self.lanes = 2 if config.cfg_scale > 0 else 1
        self.shift = model.facts.logit_shift
        self.grid = model.facts.block_length  # of the attention; None: bidirectional
        self.backbone, self.head, self.device = model.backbone, model.head, model.device
        self.count = 0
        self.buffer: KVBuffer | None = None
        self.hook: LayerHook | None = None
        self.static: Static | None = None
        self._tempered = model.facts.score_source == "tempered"
        self._compares = "kl" in sampler.statistics
        # At temperature 0 the proposal itself is the likeliest token.
        clean_top = int("top_token" in sampler.statistics and config.temperature > 0)
        self._top = max(config.top_candidates, clean_top)
        self._banned, self._conditional_bans = self._bans(ban_stops)
        # An attention mask that is 4-D already: transformers then builds none of its own.
        self._no_mask = torch.empty(1, 1, 1, 1, device=self.device)

    def _bans(self, ban_stops: bool) -> tuple[tuple[int, ...], int]:
        """Ids that may not be proposed; the last ``n`` of them only where the text is too short."""
        facts = self.model.facts
        if facts.mask_token_id is None:
            raise ConfigError(
                f"{self.model.name} is autoregressive: it cannot fill in masks; "
                "load a diffusion model, or use it as a verifier"
            )
        always = {facts.mask_token_id} if self.config.suppress_mask else set()
        early = set(self.sampler.stop_ids)
        if self.sampler.eos.suppress and facts.eos_token_id is not None:
            always.add(facts.eos_token_id)
        if ban_stops:
            always |= early
        early = early - always if self.config.min_new_tokens else set()
        return (*sorted(always), *sorted(early)), len(early)

    def allot(self, cache: Cache, lanes: int, size: int) -> None:
        """Make room for the keys and values of ``lanes`` lanes with ``size`` positions in all."""
        layers = self.model.hf.config.num_hidden_layers
        static = self.config.cuda_graphs or self.config.compile
        self.buffer = KVBuffer(layers, size + static)
        if cache.layerwise:
            self.hook = LayerHook(self.backbone, cache, self.buffer, self.grid)
        elif static:
            self.static = Static(self.backbone, self.buffer, lanes, self.config.compile)

    def release(self) -> None:
        """Give the memory of keys and values back."""
        self.buffer = self.static = None

    def logits(self, job: Job) -> torch.Tensor:
        """Raw logits (n, V) at the targets of one job."""
        with torch.inference_mode():
            scored: torch.Tensor = self.head(self._hidden([job]))
        return scored

    def predict(self, jobs: list[Job]) -> list[Predictions]:
        """One forward; the numbers every job asked for."""
        self.count += 1
        try:
            with torch.inference_mode():
                hidden = self._hidden(jobs)
                result = self._statistics(jobs, hidden)
                return self._share(jobs, hidden, result, result.numpy())
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            self.release()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            size = sum(job.size for job in jobs)
            raise OutOfMemoryError(
                f"out of memory on a step of {size} token positions; "
                f"pass max_batch_tokens={max(1, size // 2)} or fewer prompts"
            ) from error

    def _hidden(self, jobs: list[Job]) -> torch.Tensor:
        """Final hidden states of the scored rows, (R, d), guidance applied."""
        packed = pack(jobs, self.shift, self.buffer is not None, self.device, self.grid)
        hidden = self._backbone(jobs, packed)
        if self.lanes == 1:
            return hidden[packed.scored[0]]
        # The head is affine and the weights sum to one: mixing hidden states mixes the logits.
        given, hidden_prompt = hidden[packed.scored[0]].float(), hidden[packed.scored[1]].float()
        mixed = hidden_prompt + (self.config.cfg_scale + 1) * (given - hidden_prompt)
        return mixed.to(hidden.dtype)

    def _backbone(self, jobs: list[Job], packed: Packed) -> torch.Tensor:
        """Final hidden states of a step, (Q, D)."""
        if self.static is not None:
            result = self.static.hidden(packed)
            if result is not None:
                return result
        if self.buffer is not None:
            self.buffer.slots = packed.slots
        inputs = {
            "input_ids": packed.ids,
            "position_ids": packed.positions,
            "attention_mask": self._no_mask,
            "past_key_values": self.buffer,
            "use_cache": False,
            "segments": packed.segments,
        }
        hidden: torch.Tensor
        if self.hook is None:
            hidden = self.backbone(**inputs).last_hidden_state[0]
        else:
            with self.hook.attached(jobs, packed):
                hidden = self.backbone(**inputs, watch=self.hook.watch).last_hidden_state[0]
        return hidden

    def _banned_rows(self, jobs: list[Job], count: int) -> torch.Tensor | None:
        """Which of the banned ids are so in each row, (R, n) bool; None: all of them."""
        if not self._conditional_bans:
            return None
        short = [j.asked < j.canvas.start + self.config.min_new_tokens for j in jobs]
        rows = np.ones((count, len(self._banned)), np.bool_)
        rows[:, -self._conditional_bans :] = np.concatenate(short)[:, None]
        return torch.from_numpy(rows).to(self.device)

    def _statistics(self, jobs: list[Job], hidden: torch.Tensor) -> TokenStatistics:
        config = self.config
        keys = None
        if config.temperature:
            keys = noise_keys(jobs, config.seed).to(hidden.device)
        return token_statistics(
            hidden,
            self.head,
            banned=self._banned,
            banned_rows=self._banned_rows(jobs, len(hidden)),
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            tempered=self._tempered,
            noise_keys=keys,
            top=self._top,
            needs=self.sampler.statistics,
        )

    def _clean(
        self, jobs: list[Job], hidden: torch.Tensor, result: TokenStatistics
    ) -> TokenStatistics:
        """Tokens with log-probabilities of the clean distribution: ``found`` unless it describes
        what temperature and filters leave."""
        config = self.config
        if not self._tempered or not (config.temperature or config.top_p < 1 or config.top_k):
            return result
        rows = self._banned_rows(jobs, len(hidden))
        return token_statistics(hidden, self.head, banned=self._banned, banned_rows=rows, needs=())

    def _share(
        self, jobs: list[Job], hidden: torch.Tensor, raw: TokenStatistics, result: TokenStatistics
    ) -> list[Predictions]:
        """Each job's part of the statistics, on the device ``raw`` and on the host ``found``."""
        shares: list[Predictions] = []
        at = 0
        asks = [self.sampler.asks(job.canvas, job.targets) for job in jobs]
        if any(asks) or any(job.shadow.size for job in jobs):
            raw = self._clean(jobs, hidden, raw)
        for job, wanted in zip(jobs, asks, strict=True):
            here = slice(at, at + len(job.targets))
            at = here.stop + len(job.shadow)
            kl = None
            if self._compares:
                job.logprobs = log_probabilities(hidden[here], self.head, self._banned)
                kl = divergence(job.targets, job.logprobs, job.row.previous)
            asked = {name: self._logprobs(hidden, raw, here, ids) for name, ids in wanted.items()}
            shadow = None
            if job.shadow.size:
                there = slice(here.stop, at)
                standing = job.canvas.tokens[job.shadow][:, None]
                stands = {"stands": self._logprobs(hidden, raw, there, standing)}
                shadow = _prediction(job.shadow, result, there, None, stands)
            shares.append((_prediction(job.targets, result, here, kl, asked), shadow))
        return shares

    def _logprobs(
        self, hidden: torch.Tensor, raw: TokenStatistics, here: slice, ids: IntArray
    ) -> FloatArray:
        """(n, m) clean log-probabilities of ``ids``, beside the clean statistics ``raw``."""
        wanted = torch.from_numpy(ids).to(hidden.device)
        return logprobs_of(
            hidden[here], self.head, wanted, raw.token[here], raw.logprob[here]
        ).cpu().numpy()  # fmt: skip


def _prediction(
    positions: IntArray, result: TokenStatistics, here: slice, kl: FloatArray | None,
    asked: dict[str, FloatArray],
) -> Prediction:  # fmt: skip
    def cut(array: Any) -> Any:
        return None if array is None else array[here]

    return Prediction(
        positions, result.token[here], result.logprob[here], cut(result.margin), cut(result.gap),
        cut(result.entropy), cut(result.max_logprob), kl, cut(result.top_token),
        cut(result.top_logprob), asked,
    )  # fmt: skip


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return "not enough memory" in text or "can't allocate memory" in text
