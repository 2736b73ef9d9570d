"""The device half of a step: jobs in, one forward, a few numbers per position out.

It owns what lives on the device between steps: keys and values, static graphs, the layer hook.
It knows nothing of how positions are chosen.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..cache import Cache
from ..core.canvas import PROPOSAL, IntArray
from ..core.errors import ConfigError, NumericError
from ..kernels.divergence import drawn_from, log_probabilities, residual
from ..kernels.linear import check_packed
from ..kernels.statistics import (
    Biased,
    Head,
    Shaped,
    TokenStatistics,
    full_logits,
    logprobs_of,
    token_statistics,
)
from ..kernels.transfer import ToHost
from ..models import DiffusionModel
from ..samplers import Prediction
from .answers import Predictions, by_group, predictions
from .graphs import Static, check_static
from .kv import KVBuffer
from .layers import LayerHook
from .packing import Packed, noise_keys, pack
from .recipe import RowOptions, bans
from .rows import Job, Soft
from .soft import soft_inputs
from .visibility import Visibility

Answer = Callable[[list[Any]], list[Predictions | NumericError]]  # of the numbers on the host
UNLIKELIEST = -27.6  # log-probability that a draft had at least
# Columns that are fields of a prediction.
READ = ("token", "logprob", "margin", "gap", "entropy", "max_logprob", "top_token", "top_logprob")


@dataclass(slots=True, eq=False)
class Group:
    """Jobs of equal options: the ``members`` of the step, none where all are; ``up``: what their
    statistics need on the device, by name, which goes up with the step's ids."""

    members: list[int]
    jobs: list[Job]
    options: RowOptions
    up: dict[str, Any]


@dataclass(slots=True)
class PendingAnswers:
    """A forward that was launched.  `wait` once, for the numbers that every job asked for, or why
    it has none; the host may do other things before."""

    forward: "Forward"
    numbers: ToHost
    answer: Answer

    def wait(self) -> list[Predictions | NumericError]:
        began = time.perf_counter()
        arrays = self.numbers.arrays()
        self.forward.seconds += time.perf_counter() - began
        return self.answer(arrays)


class Forward:
    """One forward for all jobs of a step, and the statistics of the positions they ask for.

    Jobs may come from rows with different recipes: the backbone sees them all at once, the head
    and the statistics run once per group of equal `RowOptions`; the host gets all in one copy.
    """

    def __init__(self, model: DiffusionModel, cache: Cache, graphs: bool = False) -> None:
        if graphs:
            check_static(cache, model.backbone)
        self.model, self.cache = model, cache
        self.shift = model.facts.logit_shift
        self.visibility = Visibility.of(model.facts)
        self.layers = model.layers
        self.uniform = model.facts.vocab_size if model.facts.uniform else 0
        self.backbone, self.device = model.backbone, model.device
        self.cap: float | None = getattr(model.hf, "final_logit_softcapping", None)
        spread = len({*getattr(model.hf, "hf_device_map", {}).values()}) > 1
        self._own_head: Head = self._gathered_head if spread else model.head
        self.head: Head = self._own_head if self.cap is None else Shaped(self._own_head, self.cap)
        self.count = 0
        self._last: Packed | None = None  # the forward before
        self.seconds = 0.0  # of all forwards with their statistics
        check_packed(self.backbone)
        check_packed(model.head)
        self.buffer: KVBuffer | None = None
        self.hook: LayerHook | None = None
        self._static = graphs
        self.static = Static(self.backbone) if graphs and cache.name == "none" else None
        self._tempered = model.facts.score_source == "tempered"

    def allot(self, size: int, most: int | None = None) -> None:
        """Make room for the keys and values of ``size`` positions, ``most`` when it has to grow.
        What was held before is given back."""
        scratch = int(self._static)
        most = None if most is None else most + scratch
        self.buffer = KVBuffer(self.layers, size + scratch, most)
        if self.cache.layerwise:
            self.hook = LayerHook(self.backbone, self.cache, self.buffer, self.visibility)
        elif self._static:
            slot = self.buffer.allocate(1)
            assert slot is not None
            self.static = Static(self.backbone, self.buffer, slot)

    def release(self) -> None:
        self.buffer = self.hook = self.static = self._last = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def logits(self, jobs: list[Job]) -> list[torch.Tensor]:
        """Raw logits (n, V) at the targets of each job, in one forward."""
        with torch.inference_mode():
            scored = full_logits(self.hidden(jobs), self.head)
        return list(torch.split(scored, [len(job.targets) for job in jobs]))

    def launch(self, jobs: list[Job]) -> PendingAnswers:
        """Let the device compute one forward, and the numbers that every job asks for."""
        self.count += 1
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                groups = self._groups(jobs)
                numbers, answer = self._columns(jobs, groups, self.hidden(jobs, groups))
                return PendingAnswers(self, ToHost(numbers), answer)
        finally:
            self.seconds += time.perf_counter() - began

    def hidden(self, jobs: list[Job], groups: Sequence[Group] = ()) -> torch.Tensor:
        """Final hidden states of the scored rows, (R, d), guidance applied; in the order of the
        ``groups`` where there are some.  All that goes up goes with the ids."""
        stored = self.buffer is not None
        own = [job for job in jobs if job.own]
        for job in own:
            job.up = {f"asked.{name}": ids for name, ids in job.ids.items()}
            judged = job.masks if job.masks.size else job.targets
            if job.verifies:
                job.up["standing"] = job.canvas.tokens[judged][:, None]
                assert job.row.previous is not None, "the step before has predicted these positions"
                job.up["before"] = np.searchsorted(job.row.previous[0], judged)
                job.up["keys"] = noise_keys([job])
        lots = [(up, name) for up in [*[g.up for g in groups], *[j.up for j in own]] for name in up]
        order = [i for group in groups for i in group.members] if len(groups) > 1 else None
        packed = pack(jobs, self.shift, stored, self.device, self.visibility, self._last,
                      self.uniform, [up[name] for up, name in lots], order)  # fmt: skip
        for (up, name), there in zip(lots, packed.further, strict=True):
            up[name] = there
        self._last = packed if packed.layouts is not None else None
        hidden = self._backbone(packed, jobs)
        try:
            scored = hidden.index_select(0, packed.scored)
        except IndexError:
            raise ConfigError(
                "the plan of a cache leaves out a position whose prediction was asked for: "
                "`Plan.compute` holds `Plan.rows(targets, shift)`"
            ) from None
        if packed.guided is None:
            return scored
        # The head is affine and the weights sum to one: mixing hidden states mixes the logits.
        which, second, scale = packed.guided
        given, hidden_prompt = scored[which].float(), hidden[second].float()
        mixed = hidden_prompt + (scale + 1) * (given - hidden_prompt)
        scored[which] = mixed.to(hidden.dtype)
        return scored

    def _backbone(self, packed: Packed, jobs: Sequence[Job]) -> torch.Tensor:
        """Final hidden states of a step, (Q, D)."""
        soft = soft_inputs(jobs, packed, self.model.family.self_conditioning, self.model)
        if self.static is not None and not soft:
            result = self.static.hidden(packed)
            if result is not None:
                return result
        inputs = packed.inputs(self.buffer) | soft
        if "inputs_embeds" in soft:
            inputs["input_ids"] = None
        hidden: torch.Tensor
        if self.hook is None:
            only = packed.scored if packed.guided is None else None  # what is read of the rows
            hidden = self.backbone(**inputs, scored=only).last_hidden_state[0]
        else:
            hidden = self.hook.run(packed, inputs)
        return hidden.to(self.device)  # the last layers may lie on another one

    def _gathered_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head of a network that lies on several devices."""
        logits: torch.Tensor = self.model.head(hidden)
        return logits.to(self.device)

    def _groups(self, jobs: list[Job]) -> list[Group]:
        options = jobs[0].options
        if not [job for job in jobs if job.options is not options]:
            return [Group([], jobs, options, self._uploads(jobs, options))]
        sets: dict[RowOptions, list[int]] = {}
        for i, job in enumerate(jobs):
            sets.setdefault(job.options, []).append(i)
        result = []
        for options, members in sets.items():
            mine = [jobs[i] for i in members]
            result.append(Group(members, mine, options, self._uploads(mine, options)))
        return result

    def _uploads(self, jobs: list[Job], options: RowOptions) -> dict[str, Any]:
        """What the statistics of jobs with equal options need on the device, row by row."""
        up: dict[str, Any] = {}
        if options.keyed:
            up["keys"] = noise_keys(jobs)
        elif options.filters.temperature:
            shares = [job.canvas.uniform(PROPOSAL, job.asked) for job in jobs]
            up["uniforms"] = np.concatenate(shares)
        if options.conditional:
            ids = options.banned[-options.conditional :]
            some = [bans(job.row.recipe, job.canvas, job.asked, ids) for job in jobs]
            up["banned"] = np.ones((sum(map(len, some)), len(options.banned)), np.bool_)
            up["banned"][:, -options.conditional :] = np.concatenate(some)
        if options.signal is not None:
            up["held"] = np.concatenate(
                [job.canvas.fed_ids(job.asked, self.uniform) for job in jobs]
            )
        return up

    def _columns(
        self, jobs: list[Job], groups: list[Group], hidden: torch.Tensor
    ) -> tuple[list[torch.Tensor], Answer]:
        """Statistics of every group, and what makes each job's part of them, once on the host."""
        if len(groups) == 1 and not [job for job in jobs if job.own]:
            result = self._statistics(groups[0], hidden)
            names = [name for name in READ if getattr(result, name) is not None]
            answer = partial(_in_columns, jobs, [job.targets for job in jobs], names)
            return [getattr(result, name) for name in names], answer
        own = {id(job): dict[str, torch.Tensor]() for job in jobs}
        shared, at = list[dict[str, Any]](), 0
        for group in groups:
            count = sum(len(job.asked) for job in group.jobs)
            shared.append(dict(self._group(group, own, hidden[at : at + count]).columns()))
            at += count
        members = [group.members or [*range(len(jobs))] for group in groups]
        answer = partial(by_group, jobs, members, [*map(list, shared)], [*map(list, own.values())])
        return [x for numbers in (*shared, *own.values()) for x in numbers.values()], answer

    def _group(
        self, group: Group, numbers: Mapping[int, dict[str, torch.Tensor]], hidden: torch.Tensor
    ) -> TokenStatistics:
        """The statistics of jobs with equal options, one after the other.  What belongs to one job
        goes to its ``numbers``: what a part asks for as ``asked.<part>``, and of drafts that are
        judged how much likelier they are here than where they were drawn."""
        jobs, options, rows = group.jobs, group.options, group.up.get("banned")
        result = clean = self._statistics(group, hidden)
        tempered = self._tempered and (options.filters.temperature or options.filters.cut)
        if tempered and any(job.ids for job in jobs):  # these are of the clean distribution
            clean = token_statistics(
                hidden, self._head(options), banned=options.banned, banned_rows=rows, needs=()
            )
        at = 0
        for job in jobs:
            own = numbers[id(job)]
            here = slice(at, at + len(job.targets))
            at += len(job.asked)
            if "residual" in options.needs and not job.verifies:
                job.logprobs = self._all(hidden, here, options, rows)
            for name in job.ids:
                asked = f"asked.{name}"
                known = clean.token[here], clean.logprob[here]
                own[asked] = logprobs_of(hidden[here], self._head(options), job.up[asked], *known)
            if job.verifies:
                there = slice(here.stop if job.masks.size else here.start, at)
                own |= self._judged(job, self._all(hidden, there, options, rows))
        return result

    def _all(
        self, hidden: torch.Tensor, here: slice, options: RowOptions, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """(n, V) clean log-probabilities."""
        banned = None if rows is None else rows[here]
        return log_probabilities(hidden[here], self._head(options), options.banned, banned)

    def _judged(self, job: Job, scores: torch.Tensor) -> dict[str, torch.Tensor]:
        """How much likelier the job's drafts are by ``scores`` (n, V) than where they were drawn,
        and for each a token from what the others have gained."""
        assert job.row.previous is not None
        ids, filters = job.up["standing"], job.options.filters
        q = drawn_from(scores, filters)
        p = drawn_from(job.row.previous[1][job.up["before"]], filters)
        token = residual(q, p, job.up["keys"])
        return {
            "stands": q.gather(1, ids) - p.gather(1, ids).clamp_min(UNLIKELIEST),
            "residual": token, "residual_logprob": scores.gather(1, token[:, None])[:, 0],
        }  # fmt: skip

    def _statistics(self, group: Group, hidden: torch.Tensor) -> TokenStatistics:
        jobs, options, up = group.jobs, group.options, group.up
        drawn: dict[str, Any] = {}
        if options.signal is not None:
            ids = up["held"]
            odds = self.uniform * options.signal / (1 - options.signal)
            drawn |= {"select": ids, "lowered": (ids, math.log1p(odds)),
                      "floor": 1 - options.signal}  # fmt: skip
        if options.soft:  # rows of the embedding, not scaled
            drawn["embeddings"] = lambda low, high: self.model.embedding.weight[low:high]
        result = token_statistics(
            hidden, self._head(options), banned=options.banned, banned_rows=up.get("banned"),
            noise_keys=up.get("keys"), uniforms=up.get("uniforms"), filters=options.filters,
            tempered=self._tempered, top=options.top, needs=options.needs, classes=options.classes,
            **drawn,
        )  # fmt: skip
        if result.soft is not None:
            at = 0
            for job in jobs:
                here = slice(at, at + len(job.targets))
                at += len(job.asked)
                job.soft = Soft(job.targets, result.soft[here])
        return result

    def _head(self, options: RowOptions) -> Head:
        head: Head = self.head
        if options.scale != 1:
            head = Shaped(self._own_head, self.cap, options.scale)
        return Biased(head, options.bias) if options.bias else head


def _in_columns(
    jobs: list[Job], targets: list[IntArray], names: list[str], arrays: list[Any]
) -> list[Predictions | NumericError]:
    """The answers to jobs without numbers of their own, in columns."""
    columns = dict(zip(names, arrays, strict=True))
    finite = math.isfinite(np.add.reduce(columns["logprob"]))
    if finite and len(jobs) == 1:
        return [(Prediction(targets[0], **columns), None)]
    answers: list[Predictions | NumericError] = []
    at = 0
    for job, positions in zip(jobs, targets, strict=True):
        here = slice(at, at + len(positions))
        at = here.stop
        mine = {name: array[here] for name, array in columns.items()}
        answers.append((Prediction(positions, **mine), None) if finite else predictions(job, mine))
    return answers
