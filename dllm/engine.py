"""The loop: rows in, one forward per step for all of them, decisions out.

The engine knows canvases, a sampler, a cache and a model.  It knows neither text nor tokenizers.
What it guarantees for every method: a step that was paid for decides something, the mask token is
never proposed, every forward is counted, rows do not influence one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .cache import Cache, Plan, Slots
from .cache.base import check, close
from .canvas import Canvas
from .capabilities import FORESIGHT
from .config import GenerationConfig
from .errors import ConfigError, OutOfMemoryError
from .kernels.statistics import TokenStatistics, token_statistics
from .kv import KVBuffer
from .layers import LayerHook
from .models import DiffusionModel
from .packing import Job, Row, noise_keys, pack
from .samplers import Decision, Prediction, Sampler
from .samplers.compose import check_needs

MOST_IDLE_STEPS = 1_000_000  # a schedule that grants nothing for longer is broken


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did to one row."""

    canvas: Canvas
    plan: Plan
    prediction: Prediction
    decision: Decision


class Engine:
    """Decodes canvases.  One engine serves one call; the model may be shared.

    ``after_step`` is called with every canvas that took part in a step and may finish it.
    ``ban_stops`` keeps stop ids from being proposed at all, e.g. when filling holes in a text.
    """

    def __init__(
        self,
        model: DiffusionModel,
        sampler: Sampler,
        cache: Cache,
        config: GenerationConfig,
        after_step: Callable[[Canvas], None] | None = None,
        ban_stops: bool = False,
    ) -> None:
        check_needs(sampler.parts, {cache.name: cache.offers}, "a cache")
        check_needs([cache], {sampler.spec: sampler.offers}, "a sampler")
        self.model, self.sampler, self.cache, self.config = model, sampler, cache, config
        self.after_step = after_step
        self.lanes = 2 if config.cfg_scale > 0 else 1
        self.shift = model.facts.logit_shift
        self.backbone, self.head, self.device = model.backbone, model.head, model.device
        self.forwards = 0
        self.buffer: KVBuffer | None = None
        self.hook: LayerHook | None = None
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

    def run(self, canvases: Sequence[Canvas]) -> Iterator[list[Step]]:
        """Decode all rows; yields what happened after every step."""
        rows = [
            Row(canvas, Slots.empty(len(canvas.tokens), self.shift), i * self.lanes, self.lanes)
            for i, canvas in enumerate(canvases)
        ]
        if self.cache.stores and rows:
            layers = self.model.hf.config.num_hidden_layers
            stride = max(len(canvas.tokens) for canvas in canvases)
            self.buffer = KVBuffer(layers, len(rows) * self.lanes, stride)
            if self.cache.layerwise:
                self.hook = LayerHook(self.backbone, self.cache, self.buffer)
        live = [row for row in rows if not self._complete(row.canvas)]
        while live:
            jobs = [self._job(row) for row in live]
            yield [step for chunk in self._chunks(jobs) for step in self._step(chunk)]
            live = [row for row in live if not row.canvas.finished]

    def _complete(self, canvas: Canvas) -> bool:
        """Finish the row if nothing is left to decide."""
        if not canvas.finished and not canvas.masked[canvas.start : canvas.end].any():
            canvas.finish("length" if canvas.stop_position is None else "stop")
        return canvas.finished

    def _job(self, row: Row) -> Job:
        canvas = row.canvas
        for _ in range(MOST_IDLE_STEPS):
            if self.sampler.prepare(canvas):
                break
            canvas.step += 1
            canvas.block_step += 1
        else:
            raise ConfigError(f"sampler {self.sampler.spec!r} never decides anything")
        foresight = FORESIGHT in self.cache.needs
        targets = self.sampler.foreseen(canvas) if foresight else self.sampler.targets(canvas)
        slots = row.slots
        plan = self.cache.plan(canvas, slots, targets)
        if plan.answers is not None:
            served = np.intersect1d(targets, plan.answers, assume_unique=True)
            targets = served if served.size else targets
        pending = slots.waiting(canvas.length) if self.cache.prompt else targets[:0]
        plan = close(plan, targets, slots, pending)
        if self.cache.stores:
            check(plan, canvas, slots)
        return Job(row, plan, targets)

    def _chunks(self, jobs: list[Job]) -> Iterator[list[Job]]:
        """Micro-batches of at most ``max_batch_tokens`` computed positions, at least one row."""
        limit = self.config.max_batch_tokens
        chunk: list[Job] = []
        for job in jobs:
            if limit and chunk and sum(j.size for j in chunk) + job.size > limit:
                yield chunk
                chunk = []
            chunk.append(job)
        yield chunk

    def _step(self, jobs: list[Job]) -> Iterator[Step]:
        predictions = self._predict(jobs)
        for job, prediction in zip(jobs, predictions, strict=True):
            canvas, slots = job.row.canvas, job.row.slots
            slots.computed(job.plan.compute, canvas.step)
            self.cache.after_step(canvas, slots, prediction.positions, prediction.logprob)
            decision = self.sampler.decide(canvas, prediction)
            slots.changed(decision.committed)
            slots.changed(decision.remasked)
            canvas.nfe += 1
            canvas.computed += job.cost
            canvas.step += 1
            canvas.block_step += 1
            if self.after_step is not None and not canvas.finished:
                self.after_step(canvas)
            self._complete(canvas)
            yield Step(canvas, job.plan, prediction, decision)

    def _predict(self, jobs: list[Job]) -> list[Prediction]:
        """One forward; the numbers every row asked for."""
        self.forwards += 1
        try:
            with torch.inference_mode():
                found = self._statistics(jobs, self._hidden(jobs)).numpy()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            self.buffer = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            size = sum(job.size for job in jobs)
            raise OutOfMemoryError(
                f"out of memory on a step of {size} token positions; "
                f"pass max_batch_tokens={max(1, size // 2)} or fewer prompts"
            ) from error
        predictions, at = [], 0
        for job in jobs:
            here = slice(at, at + len(job.targets))
            predictions.append(_prediction(job, found, here))
            at = here.stop
        return predictions

    def _hidden(self, jobs: list[Job]) -> torch.Tensor:
        """Final hidden states of the scored rows, (R, d), guidance applied."""
        stride = None if self.buffer is None else self.buffer.stride
        packed = pack(jobs, self.shift, stride, self.device)
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
        if self.lanes == 1:
            return hidden[packed.scored[0]]
        # The head is affine and the weights sum to one: mixing hidden states mixes the logits.
        given, hidden_prompt = hidden[packed.scored[0]].float(), hidden[packed.scored[1]].float()
        mixed = hidden_prompt + (self.config.cfg_scale + 1) * (given - hidden_prompt)
        return mixed.to(hidden.dtype)

    def _statistics(self, jobs: list[Job], hidden: torch.Tensor) -> TokenStatistics:
        config = self.config
        banned_rows = None
        if self._conditional_bans:
            short = [j.targets < j.row.canvas.start + config.min_new_tokens for j in jobs]
            rows = np.ones((len(hidden), len(self._banned)), np.bool_)
            rows[:, -self._conditional_bans :] = np.concatenate(short)[:, None]
            banned_rows = torch.from_numpy(rows).to(hidden.device)
        return token_statistics(
            hidden,
            self.head,
            banned=self._banned,
            banned_rows=banned_rows,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            tempered=self.model.facts.score_source == "tempered",
            noise_keys=noise_keys(jobs, config.seed).to(hidden.device)
            if config.temperature
            else None,
            top=config.top_candidates,
            needs=self.sampler.statistics,
        )


def _prediction(job: Job, found: TokenStatistics, here: slice) -> Prediction:
    def cut(array: Any) -> Any:
        return None if array is None else array[here]

    return Prediction(
        job.targets, found.token[here], found.logprob[here],
        cut(found.margin), cut(found.gap), cut(found.entropy),
        cut(found.top_token), cut(found.top_logprob),
    )  # fmt: skip


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return "not enough memory" in text or "can't allocate memory" in text
