"""One step of one row, on the host: what it feeds, and what it makes of the answers."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..cache import Cache, Plan
from ..cache.base import OPEN_BLOCK, STEP, check, complete_plan
from ..core.canvas import Canvas, IntArray
from ..core.capabilities import FORESIGHT
from ..core.errors import ConfigError, NumericError
from ..samplers import NOTHING, THE_ROW, Decision, Seen, Trial
from .answers import Predictions
from .kv import KVBuffer
from .recipe import MaskedRecipe
from .rows import Job, Row, Step

MOST_IDLE_STEPS = 16_384  # in a row: a schedule that grants nothing for longer is broken


def jobs_of(row: Row, cache: Cache) -> list[Job]:
    """What the row feeds next: itself, or its branches.  Moves its window; asked once per step."""
    canvas, sampler = row.canvas, row.recipe.sampler
    before = row.same_as_before
    if before is not None and _repeats(row, before[0]):
        return before
    for _ in range(MOST_IDLE_STEPS):
        if sampler.prepare(canvas):
            break
        canvas.step += 1
        canvas.block_step += 1
    else:
        raise ConfigError(
            f"sampler {sampler.spec!r} decides nothing in {MOST_IDLE_STEPS} steps: use fewer steps"
        )
    targets, ids = sampler.reads(canvas)
    if not targets.size:
        raise ConfigError(f"{sampler.window.name}.advance left nothing undecided in the window")
    if FORESIGHT in cache.needs:
        targets = sampler.foreseen(canvas)
    plan, targets = plan_of(row, canvas, cache, targets)
    feed = row.feed = sampler.feeds(canvas)
    verifies = bool(feed.branches) and "residual" in row.options.needs
    again, ordered = feed.masks, feed.ordered
    jobs = []
    for i, fork in enumerate(_forks(row, cache)):
        if verifies:
            # Where logits are shifted, the token to the left judges, and no mask is needed.
            masks, read = (NOTHING, again) if row.slots.shift else (again, NOTHING)
            jobs.append(Job(row, fork, plan, read, 0, masks, ordered=ordered, verifies=True))
            continue
        wanted, asked, own = targets, ids, plan
        if fork is not canvas:
            wanted, asked = sampler.reads(fork)
            if cache.branches_slide:
                own = complete_plan(cache.branch(fork, plan), wanted, row.slots, NOTHING)
            elif not cache.stores and wanted.size:  # its window may end in a later block
                own, wanted = plan_of(row, fork, cache, wanted)
        jobs.append(Job.of(row, fork, own, wanted, asked, i * row.recipe.lanes, ordered))
    return jobs


def opening_of(row: Row, cache: Cache) -> list[Job]:
    """Where the causal model says what a block begins with: the pass over all that stands before a
    block of which nothing is decided yet.  It is no step of any schedule."""
    canvas, slots = row.canvas, row.slots
    first = canvas.frontier()
    low, _ = canvas.block_at(first, slots.block_length)
    begun = canvas.window[0] <= first < canvas.window[1] and canvas.block_step > 0
    if first != low or low == canvas.end or not low or begun or canvas.revising:
        return []
    plan = cache.opening(slots, low)
    if cache.stores:
        check(plan, canvas, slots)
    row.feed = THE_ROW
    row.drop_plan()
    return [Job(row, canvas, plan, np.array([low]), opening=low)]


def _repeats(row: Row, job: Job) -> bool:
    """Let the job of the last step stand for the next one, if its plan still holds."""
    canvas, sampler = row.canvas, row.recipe.sampler
    if row.open:  # found when the last step was settled
        return True
    length, window = job.extent
    if canvas.length != length or (canvas.window != window and job.plan.until == OPEN_BLOCK):
        return False
    masks = canvas.masks()
    if not (masks.size and sampler.stays and not sampler.resting):
        by_block = job.plan.until == OPEN_BLOCK
        if (by_block and not sampler.stays) or not sampler.prepare(canvas):
            return False
        if by_block and canvas.window != window:
            return False
        masks = canvas.masks()
    job.targets = masks
    return masks.size > 0


def _goes_on(job: Job) -> bool:
    """Whether the window that a step decided in still has something undecided; then that is what
    the next step predicts."""
    canvas = job.canvas
    if job.extent != (canvas.length, canvas.window) or not (masks := canvas.masks()).size:
        return False
    job.targets = masks
    return True


def may_repeat(row: Row, job: Job, decision: Decision) -> bool:
    """Whether the next step may feed what this one has."""
    if not job.plan.until or not row.recipe.sampler.plain or decision.edits or job.masks.size:
        return False
    canvas = row.canvas
    if canvas.finish_reason is not None or decision.padded.size or job.wanted is not None:
        return False
    return job.lanes == 1


def _forks(row: Row, cache: Cache) -> list[Canvas]:
    """The canvases to feed.  Each has a window of its own, which slides by its trial; where keys
    and values are kept, most caches compute only the row's, which all of them have."""
    forks, sampler = row.forks(), row.recipe.sampler
    for fork, trial in zip(forks, row.feed.branches, strict=False):
        if cache.branches_slide:
            sampler.eos.check(fork, trial.positions, sampler.stop_ids)
        if cache.branches_slide or (not cache.stores and fork.masks().size):
            sampler.prepare(fork)
    return forks


def plan_of(row: Row, canvas: Canvas, cache: Cache, targets: IntArray) -> tuple[Plan, IntArray]:
    """What a canvas of the row computes and reads, and the targets that the cache serves."""
    slots = row.slots
    plan = cache.plan(canvas, slots, targets)
    made = getattr(plan, "compute", None)
    if not (isinstance(made, np.ndarray) and made.dtype == np.int64):
        raise ConfigError(
            f"{cache.name}.plan returned no Plan of positions, (n,) int64: return "
            "Plan(np.flatnonzero(chosen)), where chosen has one bool per position"
        )
    if plan.answers is not None:
        served = np.intersect1d(targets, plan.answers, assume_unique=True)
        targets = served if served.size else targets
    pending = slots.waiting(canvas.length) if cache.recompute_pending else NOTHING
    plan = complete_plan(plan, targets, slots, pending)
    if row.options.soft:  # all of the open block is fed what is expected there
        low, _ = canvas.block_at(canvas.window[0], slots.block_length)
        plan = replace(plan, asks=np.arange(low, slots.end(canvas, targets)), until=STEP)
    if plan.asks is not None:
        plan = complete_plan(plan, plan.asks, slots, NOTHING)
    if cache.stores:
        check(plan, canvas, slots)
    return plan, targets


def settle(
    row: Row, answers: list[Predictions | NumericError], cache: Cache, buffer: KVBuffer | None
) -> Step:
    """What the row makes of its predictions, a pair per job; raises what stands in their place."""
    jobs, canvas, slots, sampler = row.jobs, row.canvas, row.slots, row.recipe.sampler
    for answer in answers:
        if isinstance(answer, NumericError):
            raise answer
    predictions: list[Any] = answers
    job, step, window = jobs[0], canvas.step, canvas.window
    seen = [
        Seen(one.canvas, p if one.wanted is None else p.take(one.wanted), masks)
        for one, (p, masks) in zip(jobs, predictions, strict=True)
    ]
    if canvas.finish_reason is None and job.opening is not None:
        decision = _opened(row, seen[0].prediction)
    elif canvas.finish_reason is None:
        decision = sampler.decide(canvas, row.feed, seen)
    else:
        decision = Decision(NOTHING, NOTHING)
    gained, kept = None, decision.kept
    if kept is not None:
        gained, job = row.feed.branches[kept], jobs[kept]
    prediction = seen[kept or 0].prediction
    if sampler.courses or job.logprobs is not None:
        _keep(row, kept or 0, buffer)
    plan, layout = job.plan, job.layout
    fed = plan.compute if layout is None else layout.where
    slots.age[fed] = step
    slots.pending[fed] = bool(row.feed.branches) and kept is None  # what was fed was given up
    if row.feed.mixture is not None:  # their keys are not those of a token
        slots.pending[row.feed.mixture.positions] = True
    if slots.prefix >= 0:
        low = job.opening
        if low is None:
            low, _ = canvas.block_at(job.extent[1][0], slots.block_length)
        slots.prefix = max(slots.prefix, min(low, int(plan.compute[-1]) + 1))
    if row.feed.soft and job.soft is not None:
        row.soft = job.soft
    if row.recipe.format is not None:
        decision = literals_after(row.recipe, canvas, decision)
    for positions in (decision.committed, decision.remasked, decision.padded):
        if positions.size:
            slots.changed(positions)
    row.feed, row.jobs = THE_ROW, []
    cost = sum([job.cost for job in jobs])
    if gained is not None or len(jobs) > 1:
        decision = decision.after(gained, explored=len(jobs) - 1)
    canvas.nfe += 1
    canvas.computed += cost
    canvas.probes += decision.probe
    if job.opening is None and not decision.probe:  # others are no step of any schedule
        canvas.step = step + 1
        canvas.block_step += 1
    row.drop_plan()
    if len(jobs) == 1 and job.opening is None and may_repeat(row, job, decision):
        row.same_as_before = jobs
        row.open = sampler.stays and not sampler.resting and _goes_on(job)
    if decision.edits:
        row.edit(decision.edits, cache)
    if row.recipe.after_step is not None:
        row.recipe.after_step(canvas)
    if decision.probe:
        row.slots = row.slots.fresh(canvas.length)
    elif not row.open:
        complete(canvas)
    return Step(
        row=row, canvas=canvas, decision=decision,
        window=window if canvas.end < window[1] else canvas.window,  # an end cuts it
        number=max(0, canvas.step - 1), positions=cost, plan=plan, prediction=prediction,
    )  # fmt: skip


def _opened(row: Row, prediction: Any) -> Decision:
    """Decide the first position of a block, as the causal model proposes it."""
    canvas, sampler, p = row.canvas, row.recipe.sampler, prediction
    end = canvas.end
    canvas.commit(p.positions, p.token, p.logprob)
    sampler.eos.check(canvas, p.positions, sampler.stop_ids)
    padded = np.arange(canvas.end, min(end, canvas.length))
    return Decision(p.positions, NOTHING, tokens=p.token, logprobs=p.logprob, padded=padded)


def literals_after(recipe: MaskedRecipe, canvas: Canvas, decision: Decision) -> Decision:
    """The decision, and what the format leaves no choice about in the window after it."""
    busy = bool(canvas.finished or canvas.revising or decision.edits or decision.probe)
    busy = busy or bool(recipe.sampler.feeds(canvas).branches)
    if recipe.format is None or recipe.format.literals is None or busy:
        return decision
    positions, tokens = recipe.format.settled(canvas, canvas.window[1])
    sure = np.zeros(len(positions), np.float32)
    canvas.commit(positions, tokens, sure)
    trial = Trial(positions, tokens, sure) if positions.size else None
    return decision.after(trial, decision.explored)


def _keep(row: Row, kept: int, buffer: KVBuffer | None) -> None:
    """Give a branch's keys and values to the others, and its last distributions to the row."""
    job, width = row.jobs[kept], row.recipe.width
    if buffer is not None and width > 1:
        others = [i * job.lanes for i in range(width) if i * job.lanes != job.lane]
        for lane in range(job.lanes):
            to = [row.lane(other + lane) for other in others]
            buffer.copy(job.base(lane), to, torch.from_numpy(job.plan.compute))
    if job.logprobs is not None:
        row.previous = job.targets, job.logprobs


def complete(canvas: Canvas) -> bool:
    """Finish the row if nothing is left to decide; whether it is finished."""
    settled = not canvas.finished and not canvas.revising
    if settled and not np.count_nonzero(canvas.masked[canvas.start : canvas.end]):
        # A rule may also end the text at a stop id that is proposed and never committed.
        most = max(canvas.start + canvas.cap, canvas.region[1])
        ended = canvas.stop_position is not None or canvas.end < most
        canvas.finish("stop" if ended else "length")
    return canvas.finished
