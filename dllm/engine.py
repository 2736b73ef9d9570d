"""The loop: rows in, one forward per step for all of them, decisions out.

The engine knows canvases, a sampler, a cache and a model.  It knows neither text nor tokenizers.
What it guarantees for every method: a step that was paid for decides something, the mask token is
never proposed, every forward is counted, rows do not influence one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .cache import Cache, Plan, Slots
from .cache.base import check, close
from .canvas import Canvas, FloatArray, IntArray
from .capabilities import BLOCK_CAUSAL, FORESIGHT, SHADOW, UNSHIFTED
from .config import GenerationConfig
from .errors import ConfigError, OutOfMemoryError
from .graphs import Static
from .kernels.divergence import divergence, log_probabilities
from .kernels.statistics import TokenStatistics, logprobs_of, token_statistics
from .kv import KVBuffer
from .layers import LayerHook
from .models import DiffusionModel
from .packing import Job, Packed, Row, noise_keys, pack
from .samplers import NOTHING, Decision, Gamble, Prediction, Sampler
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
        _check(model, sampler, cache, config)
        self.model, self.sampler, self.cache, self.config = model, sampler, cache, config
        self.after_step = after_step
        self.lanes = 2 if config.cfg_scale > 0 else 1
        self.width = 1 if sampler.explorer is None else sampler.explorer.width
        self.shift = model.facts.logit_shift
        self.grid = model.facts.block_length  # of the attention; None: bidirectional
        self.backbone, self.head, self.device = model.backbone, model.head, model.device
        self.forwards = 0
        self.buffer: KVBuffer | None = None
        self.hook: LayerHook | None = None
        self.static: Static | None = None
        # At temperature 0 the proposal itself is the likeliest token.
        self._clean_top = int("top_token" in sampler.statistics and config.temperature > 0)
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
        yield from self.resume(self.open(canvases))

    def open(self, canvases: Sequence[Canvas]) -> list[Row]:
        """Rows nothing was computed for yet, and room for their keys and values."""
        per_row = self.lanes * self.width
        rows = [
            Row(canvas, Slots.empty(len(canvas.tokens), self.shift, self.grid or 0), i * per_row)
            for i, canvas in enumerate(canvases)
        ]
        if self.grid:
            for canvas in canvases:
                canvas.origin = 0
        if self.cache.stores and rows:
            layers = self.model.hf.config.num_hidden_layers
            stride = max(len(canvas.tokens) for canvas in canvases)
            static = self.config.cuda_graphs or self.config.compile
            self.buffer = KVBuffer(layers, len(rows) * per_row + static, stride)
            if self.cache.layerwise:
                self.hook = LayerHook(self.backbone, self.cache, self.buffer, self.grid)
            elif static:
                self.static = Static(self.backbone, self.buffer, self.device, self.config.compile)
        return rows

    def resume(self, rows: Sequence[Row]) -> Iterator[list[Step]]:
        """Decode rows from `open`, from wherever they are."""
        live = [row for row in rows if not self._complete(row.canvas)]
        while live:
            groups = [self._jobs(row) for row in live]
            yield [step for chunk in self._chunks(groups) for step in self._step(chunk)]
            live = [row for row in live if not row.canvas.finished]

    def logits(self, row: Row) -> torch.Tensor:
        """Raw logits (n, V) of the undecided positions of the row's window.  Decides nothing."""
        canvas, targets = row.canvas, row.canvas.masks()
        plan, targets = self._plan(row, targets)
        job = Job(row, canvas, plan, targets, row.lane, self.lanes)
        with torch.inference_mode():
            scored: torch.Tensor = self.head(self._hidden([job]))
        row.slots.computed(plan.compute, canvas.step)
        canvas.nfe += 1
        canvas.computed += job.size
        return scored

    def _complete(self, canvas: Canvas) -> bool:
        """Finish the row if nothing is left to decide."""
        if not canvas.finished and not canvas.masked[canvas.start : canvas.end].any():
            canvas.finish("length" if canvas.stop_position is None else "stop")
        return canvas.finished

    def _jobs(self, row: Row) -> list[Job]:
        """What the row feeds in this step: itself, or its branches."""
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
        plan, targets = self._plan(row, targets)
        shadow = self.sampler.shadow(canvas)
        branches = row.branches()
        return [
            Job(
                row, branch, plan,
                targets if branch is canvas else self.sampler.targets(branch),
                row.lane + i * self.lanes, self.lanes, shadow,
            )
            for i, branch in enumerate(branches)
        ]  # fmt: skip

    def _plan(self, row: Row, targets: IntArray) -> tuple[Plan, IntArray]:
        """What the row computes and reads, and those of the targets that the cache serves."""
        canvas, slots = row.canvas, row.slots
        plan = self.cache.plan(canvas, slots, targets)
        if plan.answers is not None:
            served = np.intersect1d(targets, plan.answers, assume_unique=True)
            targets = served if served.size else targets
        pending = slots.waiting(canvas.length) if self.cache.prompt else targets[:0]
        plan = close(plan, targets, slots, pending)
        if self.cache.stores:
            check(plan, canvas, slots)
        return plan, targets

    def _chunks(self, groups: list[list[Job]]) -> Iterator[list[list[Job]]]:
        """Micro-batches of at most ``max_batch_tokens`` computed positions, at least one row."""
        limit = self.config.max_batch_tokens
        chunk: list[list[Job]] = []
        held = 0
        for group in groups:
            size = sum(job.size for job in group)
            if limit and chunk and held + size > limit:
                yield chunk
                chunk, held = [], 0
            chunk.append(group)
            held += size
        yield chunk

    def _step(self, groups: list[list[Job]]) -> Iterator[Step]:
        found = iter(self._predict([job for group in groups for job in group]))
        for group in groups:
            predictions = [next(found) for _ in group]
            row, plan, kept = group[0].row, group[0].plan, 0
            canvas, slots = row.canvas, row.slots
            if len(group) > 1:
                kept = self._choose(group, [prediction for prediction, _ in predictions])
            gained = self._keep(group, kept)
            slots.computed(plan.compute, canvas.step)
            prediction, shadow = predictions[kept]
            self.cache.after_step(canvas, slots, prediction.positions, prediction.logprob)
            decision = Decision(NOTHING, NOTHING)
            if not canvas.finished:
                decision = self.sampler.decide(canvas, prediction, shadow)
            slots.changed(decision.committed)
            slots.changed(decision.remasked)
            row.gambles = decision.gambles
            if gained is not None or len(group) > 1:
                decision = decision.after(gained, explored=len(group) - 1)
            canvas.nfe += 1
            canvas.computed += sum(job.cost for job in group)
            canvas.step += 1
            canvas.block_step += 1
            if self.after_step is not None and not canvas.finished:
                self.after_step(canvas)
            self._complete(canvas)
            yield Step(canvas, plan, prediction, decision)

    def _choose(self, group: list[Job], predictions: list[Prediction]) -> int:
        assert self.sampler.explorer is not None
        branches = [job.canvas for job in group]
        return self.sampler.explorer.choose(self.sampler.inner.decide, branches, predictions)

    def _keep(self, group: list[Job], kept: int) -> Gamble | None:
        """Make a branch the row: its gamble, its keys and values, its last distributions."""
        job = group[kept]
        row = job.row
        gamble = row.gambles[kept] if row.gambles else None
        if gamble is not None:
            self.sampler.adopt(row.canvas, gamble)
        if self.buffer is not None and self.width > 1:
            lanes = range(row.lane, row.lane + self.width * self.lanes, self.lanes)
            for lane in range(self.lanes):
                others = [first + lane for first in lanes if first != job.lane]
                at = torch.from_numpy(job.plan.compute)
                self.buffer.copy(job.lane + lane, others, at)
        if job.logprobs is not None:
            row.previous = job.targets, job.logprobs
        return gamble

    def _predict(self, jobs: list[Job]) -> list[tuple[Prediction, Prediction | None]]:
        """One forward; the numbers every row asked for."""
        self.forwards += 1
        try:
            with torch.inference_mode():
                hidden = self._hidden(jobs)
                found = self._statistics(jobs, hidden)
                extras = self._extras(jobs, hidden, found)
                found = found.numpy()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            self.buffer = self.static = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            size = sum(job.size for job in jobs)
            raise OutOfMemoryError(
                f"out of memory on a step of {size} token positions; "
                f"pass max_batch_tokens={max(1, size // 2)} or fewer prompts"
            ) from error
        predictions, at = [], 0
        for job, (kl, asked, stands) in zip(jobs, extras, strict=True):
            here = slice(at, at + len(job.targets))
            at = here.stop + len(job.shadow)
            main = replace(_prediction(job.targets, found, here), kl=kl, asked=asked)
            shadow = None
            if job.shadow.size:
                shadow = _prediction(job.shadow, found, slice(here.stop, at))
                assert stands is not None
                shadow = replace(shadow, asked={"stands": stands})
            predictions.append((main, shadow))
        return predictions

    def _hidden(self, jobs: list[Job]) -> torch.Tensor:
        """Final hidden states of the scored rows, (R, d), guidance applied."""
        stride = None if self.buffer is None else self.buffer.stride
        packed = pack(jobs, self.shift, stride, self.device, self.grid)
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
            found = self.static.hidden(packed)
            if found is not None:
                return found
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

    def _statistics(self, jobs: list[Job], hidden: torch.Tensor) -> TokenStatistics:
        config = self.config
        banned_rows = None
        if self._conditional_bans:
            short = [j.asked < j.canvas.start + config.min_new_tokens for j in jobs]
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
            top=max(config.top_candidates, self._clean_top),
            needs=self.sampler.statistics,
        )

    def _extras(
        self, jobs: list[Job], hidden: torch.Tensor, found: TokenStatistics
    ) -> list[tuple[FloatArray | None, dict[str, FloatArray], FloatArray | None]]:
        """Per job what few samplers read: divergence from the last step, log-probabilities of the
        ids that parts ask for, and of the tokens that stand at the shadow positions."""
        extras, at = [], 0
        for job in jobs:
            here = slice(at, at + len(job.targets))
            at = here.stop + len(job.shadow)
            kl, stands = None, None
            if "kl" in self.sampler.statistics:
                job.logprobs = log_probabilities(hidden[here], self.head, self._banned)
                kl = divergence(job.targets, job.logprobs, job.row.previous)
            ids = self.sampler.asks(job.canvas, job.targets)
            asked = {name: self._of(hidden, found, here, wanted) for name, wanted in ids.items()}
            if job.shadow.size:
                standing = job.canvas.tokens[job.shadow][:, None]
                stands = self._of(hidden, found, slice(here.stop, at), standing)
            extras.append((kl, asked, stands))
        return extras

    def _of(
        self, hidden: torch.Tensor, found: TokenStatistics, here: slice, ids: IntArray
    ) -> FloatArray:
        """(n, m) log-probabilities of ``ids``."""
        wanted = torch.from_numpy(ids).to(hidden.device)
        return logprobs_of(
            hidden[here], self.head, wanted, found.token[here], found.logprob[here]
        ).cpu().numpy()  # fmt: skip


def _check(model: DiffusionModel, sampler: Sampler, cache: Cache, config: GenerationConfig) -> None:
    """Refuse parts that cannot work with the cache, the model or the call."""
    check_needs(sampler.parts, "a cache", f"cache={cache.name!r}", cache.offers)
    check_needs([cache], "a sampler", f"sampler={sampler.spec!r}", sampler.offers)
    if config.temperature > 0:
        name = f"temperature={config.temperature}"
        check_needs(sampler.parts, "a temperature", name, frozenset())
    offered = frozenset({UNSHIFTED} if model.facts.logit_shift == 0 else ())
    if model.facts.block_length:
        offered |= {BLOCK_CAUSAL}
    check_needs([*sampler.parts, cache], "a model", model.name, offered)
    shadows = sampler.reviser is not None and SHADOW in sampler.reviser.needs
    if shadows and config.cfg_scale > 0:
        raise ConfigError(f"{sampler.reviser} cannot be guided: use cfg_scale=0")
    implementation = getattr(model.hf.config, "_attn_implementation", "") or ""
    if shadows and "flash" in implementation:
        raise ConfigError(
            f"{sampler.reviser} needs attention masks: load with attn_implementation='sdpa'"
        )


def _prediction(positions: IntArray, found: TokenStatistics, here: slice) -> Prediction:
    def cut(array: Any) -> Any:
        return None if array is None else array[here]

    return Prediction(
        positions, found.token[here], found.logprob[here],
        cut(found.margin), cut(found.gap), cut(found.entropy), cut(found.max_logprob), None,
        cut(found.top_token), cut(found.top_logprob),
    )  # fmt: skip


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return "not enough memory" in text or "can't allocate memory" in text
