"""The loop: rows in, one forward per step for all of them, decisions out.

The engine knows canvases, a sampler, a cache and a model.  It knows neither text nor tokenizers.
What it guarantees for every method: a step that was paid for decides something, the mask token is
never proposed, every forward is counted, rows do not influence one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..cache import Cache, Plan, Slots
from ..cache.base import check, close
from ..canvas import Canvas, IntArray
from ..capabilities import (
    BLOCK_CAUSAL,
    FIXED_WINDOW,
    FORESIGHT,
    SHADOW,
    SLIDING_BRANCHES,
    UNSHIFTED,
)
from ..config import GenerationConfig
from ..errors import ConfigError
from ..models import DiffusionModel
from ..samplers import NOTHING, Decision, Prediction, Sampler, Trial
from ..samplers.compose import check_needs
from .forward import Forward
from .packing import Job, Row

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
        self.sampler, self.cache, self.config = sampler, cache, config
        self.after_step = after_step
        self.forward = Forward(model, sampler, config, ban_stops)
        self.width = 1 if sampler.explorer is None else sampler.explorer.width

    @property
    def forwards(self) -> int:
        """Forwards so far, for however many rows."""
        return self.forward.count

    @property
    def cache_bytes(self) -> int:
        """Memory of the keys and values that are held."""
        buffer = self.forward.buffer  # empty as a Cache of transformers, and so false
        return 0 if buffer is None else buffer.nbytes

    def run(self, canvases: Sequence[Canvas]) -> Iterator[list[Step]]:
        """Decode all rows; yields what happened after every step."""
        yield from self.resume(self.open(canvases))

    def open(self, canvases: Sequence[Canvas]) -> list[Row]:
        """Rows nothing was computed for yet, and room for their keys and values."""
        shift, grid = self.forward.shift, self.forward.grid
        lanes = self.forward.lanes * self.width
        rows, size = [], 0
        for canvas in canvases:
            length = len(canvas.tokens)
            rows.append(Row(canvas, Slots.empty(length, shift, grid or 0), size))
            size += lanes * length
        if grid:
            for canvas in canvases:
                canvas.origin = 0
        if self.cache.stores and rows:
            self.forward.allot(self.cache, lanes * len(rows), size)
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
        job = Job(row, canvas, plan, targets, lanes=self.forward.lanes)
        scored = self.forward.logits(job)
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
        branches, lanes = self._branches(row), self.forward.lanes
        return [
            Job(
                row, branch, plan,
                targets if branch is canvas else self.sampler.targets(branch),
                i * lanes, lanes, shadow,
            )
            for i, branch in enumerate(branches)
        ]  # fmt: skip

    def _branches(self, row: Row) -> list[Canvas]:
        """The canvases to feed.  Each has a window of its own, which slides by its trial; where
        keys and values are kept, all have the row's, because only that is computed."""
        branches = row.branches()
        if not self.cache.stores:
            for branch in branches:
                if branch is not row.canvas and branch.masks().size:
                    self.sampler.prepare(branch)
        return branches

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
        result = iter(self.forward.predict([job for group in groups for job in group]))
        for group in groups:
            predictions = [next(result) for _ in group]
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
            row.trials = decision.trials
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
        result = [p.of_window(b) for p, b in zip(predictions, branches, strict=True)]
        return self.sampler.explorer.choose(self.sampler.inner.decide, branches, result)

    def _keep(self, group: list[Job], kept: int) -> Trial | None:
        """Make a branch the row: its trial, its window, its keys and values, its last
        distributions."""
        job = group[kept]
        row, canvas, branch = job.row, job.row.canvas, job.canvas
        trial = row.trials[kept] if row.trials else None
        if trial is not None:
            canvas.window = branch.window
            canvas.memory, canvas.states = branch.memory, branch.states
            canvas.block, canvas.block_step = branch.block, branch.block_step
            self.sampler.adopt(canvas, trial)
        buffer = self.forward.buffer
        if buffer is not None and self.width > 1:
            others = [i * job.lanes for i in range(self.width) if i * job.lanes != job.lane]
            for lane in range(job.lanes):
                to = [row.lane(other + lane) for other in others]
                buffer.copy(job.base(lane), to, torch.from_numpy(job.plan.compute))
        if job.logprobs is not None:
            row.previous = job.targets, job.logprobs
        return trial


def check_pair(sampler: Sampler, cache: Cache) -> None:
    """Raise `ConfigError` where sampler and cache do not go together."""
    offered = cache.offers
    if not cache.stores or FIXED_WINDOW in sampler.window.offers:
        offered |= {SLIDING_BRANCHES}
    check_needs(sampler.parts, "a cache", f"cache={cache.name!r}", offered)
    check_needs([cache], "a sampler", f"sampler={sampler.spec!r}", sampler.offers)


def _check(model: DiffusionModel, sampler: Sampler, cache: Cache, config: GenerationConfig) -> None:
    """Refuse parts that cannot work with the cache, the model or the call."""
    check_pair(sampler, cache)
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
