"""Recorded runs of LoPA on D2F: the same branches in every round, fed the same, the same winner.

The official code feeds branch after branch, the row as it stands last; here they share a forward
and the row comes first.  Where logits are shifted, this library computes the row left of the open
blocks again; the official code keeps its logits from when the block before was kept, which is the
same where attention is block-causal.  Where it is not, a part that does so replays it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from dllm.cache import Plan, Slots
from dllm.cache.d2f import D2FCache
from dllm.cache.delayed import KeptBlocks
from dllm.canvas import Canvas, IntArray
from dllm.config import GenerationConfig
from dllm.engine import Engine, Recipe
from dllm.samplers import Prediction, Transform, compose
from dllm.samplers.base import Decide
from dllm.samplers.lopa import LoPA

from .conftest import goldens_dir
from .together import model_of

MASK = 255
CASES = [
    pytest.param(case, id=case["id"])
    for case in json.loads(
        (goldens_dir() / "traces" / "lopa_dream.json").read_text(encoding="utf-8")
    )["cases"]
]


@dataclass
class KeptLogits:
    """What was said of the first open position when the blocks before it were kept."""

    position: int = -1
    prediction: Prediction | None = None

    def put(self, canvas: Canvas, prediction: Prediction) -> Prediction:
        """The prediction, with what was kept for the first open position."""
        here = np.flatnonzero(prediction.positions == self.position)
        if self.prediction is None or not here.size:
            return prediction
        names = ("token", "logprob", "entropy", "margin")
        arrays = {name: getattr(prediction, name) for name in names}
        arrays = {name: array.copy() for name, array in arrays.items() if array is not None}
        for name, array in arrays.items():
            array[here] = getattr(self.prediction, name)
        return replace(prediction, **arrays)


class KeepsLogits(Transform):
    """Goes on with the logits that D2F's code keeps."""

    name = "keeps_logits"

    def apply(self, canvas: Canvas, prediction: Prediction) -> Prediction:
        logits, low = canvas.state(KeptLogits), int(canvas.state(Opened).low)
        if logits.position != low:
            here = np.flatnonzero(prediction.positions == low)
            logits.position = low
            logits.prediction = prediction.take(here) if here.size else None
            return prediction
        return logits.put(canvas, prediction)


@dataclass
class Opened:
    """Where what is computed began to be undecided when the row was planned."""

    low: int = -1


@dataclass(frozen=True)
class ReleasedLoPA(LoPA):
    """LoPA with kept logits."""

    def choose(
        self, decide: Decide, branches: Sequence[Canvas], result: Sequence[Prediction]
    ) -> int:
        kept = []
        for canvas, prediction in zip(branches, result, strict=True):
            logits = canvas.state(KeptLogits)
            same = logits.position == canvas.state(Opened).low
            kept.append(logits.put(canvas, prediction) if same else prediction)
        return super().choose(decide, branches, kept)


@dataclass(frozen=True)
class ReleasedD2F(D2FCache):
    """D2F's cache, which does not compute the row left of the open blocks again."""

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        before = slots.state(KeptBlocks).end
        plan = super().plan(canvas, slots, targets)
        canvas.state(Opened).low = slots.state(KeptBlocks).end
        return replace(plan, floor=before)


def lopa(case: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Sampler and cache; no more arguments."""
    k = case["branching_factor"]  # the row as it stands is not counted
    spec = (
        f"lopa(d2f(tau={case['skip_threshold']}), k={k + 1 if k > 1 else 1}, "
        f"alpha={case['selection_conf_alpha']}, branch_topp={case['branch_topp']}, "
        f"confidence={'prob' if case['sampling_strategy'] == 'default' else 'neg_entropy'})"
        f"+staged_blocks({case['block_size']}, "
        f"block_add_threshold={case['block_add_threshold']}, "
        f"decoded_token_threshold={case['decoded_token_threshold']})"
    )
    if case["sampling_strategy"] == "neg_entropy":
        spec += "+neg_entropy"
    if not case["use_full_attention"]:
        return spec, D2FCache(), {}
    parts = [
        ReleasedLoPA(part.base, part.k, part.alpha, part.branch_topp, part.confidence)
        if isinstance(part, LoPA) else part
        for part in compose(spec, family="dream").parts
        if part.name != "d2f"  # which the explorer brings along
    ]  # fmt: skip
    return [KeepsLogits(), *parts], ReleasedD2F(causal=False), {}


BUILDERS = {"lopa_dream": lopa}


def official(case: dict[str, Any]) -> list[list[tuple[list[int], int]]]:
    """The canvases of the branches of each round and the positions they were fed."""
    canvas = [*case["prompt"], *[MASK] * case["gen_length"]]
    rounds: dict[int, list[tuple[list[int], int]]] = {}
    forwards = zip(case["extra"]["round_of_forward"], case["n_query"], case["steps"], strict=True)
    for number, fed, step in forwards:
        rounds.setdefault(number, []).append((canvas, fed))
        canvas = [*canvas]
        for position, token in step:
            canvas[position] = token
    assert canvas == case["final"]
    return list(rounds.values())


def _left_of_a_block(case: dict[str, Any], position: int) -> bool:
    """Whether what is computed begins with the row left of a block."""
    offset = position - len(case["prompt"])
    return offset % case["block_size"] == case["block_size"] - 1 if position else False


@pytest.mark.parametrize("case", CASES)
def test_recorded_branches_are_reproduced(case: dict[str, Any]) -> None:
    sampler, cache, _ = lopa(case)
    recipe = Recipe(
        compose(sampler, stop_ids=(case["eos_id"],), family="dream"),
        GenerationConfig(suppress_mask=False, max_new_tokens=case["gen_length"]),
    )
    engine = Engine(model_of(case["model"], case["eos_id"]), cache)
    canvas = Canvas.for_prompt(
        np.array(case["prompt"]), case["gen_length"], mask_id=MASK, pad_id=case["eos_id"]
    )
    row = engine.admit(canvas, recipe, held=True)
    assert row is not None
    expected = official(case)
    for i, branches in enumerate(expected):
        assert engine.plan() == [row], i
        jobs = [*row.jobs[1:], row.jobs[0]]
        if len(jobs) == 1:  # with nothing to try the official code feeds the row twice
            branches = branches[-1:]
        fed_with = [job.canvas.tokens.tolist() for job in jobs]
        assert fed_with == [tokens for tokens, _ in branches], i
        fed = [job.size for job in jobs]
        if not case["use_full_attention"]:  # without the row left of the open blocks
            left = [_left_of_a_block(case, int(job.plan.compute[0])) for job in jobs]
            fed = [n - one for n, one in zip(fed, left, strict=True)]
        assert fed == [n for _, n in branches], i
        engine.step()
    assert row.canvas.finished
    assert row.canvas.tokens.tolist() == case["final"]
