"""Recorded runs of adaptive parallel decoding: the same tokens in every round, the same fed.

The official code feeds its verifier the draft alone and keeps the logits of the token before it;
here that token goes with the draft, so that only what the diffusion model is fed is compared.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dllm
from dllm.cache.base import Cache, Plan, Slots
from dllm.core.canvas import Canvas, IntArray
from dllm.drafting import DiffusionDrafter, Drafting, DraftRequest
from dllm.drafting.drafters.diffusion import DiffusionDrafting, Reuse

from .conftest import goldens_dir
from .recorded import recorded
from .together import model_of

MASK = 255
CASES = recorded("apd")
PARTS = frozenset({"diffusion", "apd"})  # what replays the cases, for benchmarks/fidelity.py


@dataclass(frozen=True)
class Recent(Reuse):
    """Recomputes the ``recent`` tokens before the latest, too."""

    recent: int = 0

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        compute = super().plan(canvas, slots, targets).compute
        before = np.arange(max(0, compute[0] - self.recent), compute[0])
        return Plan(np.concatenate([before, compute]))


@dataclass(eq=False, repr=False)
class Published(DiffusionDrafter):
    """No mask stands where the text cannot reach."""

    recent: int = 0

    def open(self, request: DraftRequest) -> Drafting:
        assert self.window is not None
        return super().open(replace(request, limit=request.limit - self.window))

    def _cache(self) -> Cache:
        return Recent(self.recent) if self.cache == "reuse" else super()._cache()


def drafter_of(case: dict[str, Any]) -> DiffusionDrafter:
    window = case["kv_window"]
    kept = {"cache": "none"} if window is None else {"recent": window - 1, "refresh_rounds": None}
    return Published(
        model_of(case["model"], case["eos_id"]), search="apd",
        window=case["max_lookahead"] or case["gen_length"], **kept,
    )  # fmt: skip


def written(case: dict[str, Any]) -> list[list[int]]:
    """The tokens of every step; an end of text ends it."""
    return [[token for _, token in step] for step in case["steps"]]


@pytest.mark.parametrize("case", [c for c in CASES if c.values[0]["verifier"]])
def test_recorded_rounds_are_reproduced(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fed, read = [], DiffusionDrafting.read

    def watch(self: DiffusionDrafting, *args: Any) -> Any:
        fed.append(self.row.canvas.computed)
        return read(self, *args)

    monkeypatch.setattr(DiffusionDrafting, "read", watch)
    verifier = dllm.load(Path(goldens_dir()) / case["verifier"], stop_token_ids=(case["eos_id"],))
    result = dllm.speculate(
        verifier, drafter_of(case), case["prompt"], max_new_tokens=case["gen_length"],
        rule=f"apd(weight={case['apd_mixture_weight']})",
        controller=f"fixed({case['max_lookahead'] or case['gen_length']})",
    )  # fmt: skip
    steps = written(case)
    ends = [case["eos_id"] in step for step in steps]
    if True in ends:
        last = ends.index(True)
        steps = [*steps[:last], steps[last][: steps[last].index(case["eos_id"]) + 1]]
    assert result.tokens == [token for step in steps for token in step]
    assert [r.emitted for r in result.rounds] == [len(step) for step in steps]
    assert fed == case["n_query"][: len(steps)]
    assert result.lossy


@pytest.mark.parametrize("case", [c for c in CASES if not c.values[0]["verifier"]])
def test_its_baseline_from_left_to_right_is_reproduced(case: dict[str, Any]) -> None:
    result = dllm.generate(
        model_of(case["model"], case["eos_id"]), case["prompt"],
        sampler=f"threshold(tau=0)+blocks({case['tokens_per_step']})", trace=True,
        max_new_tokens=case["gen_length"], eos_policy="none", suppress_mask=False,
    )  # fmt: skip
    steps = [[token for _, token, _ in step.commits] for step in result.trace.steps]
    assert steps == written(case)
    assert [step.computed for step in result.trace.steps] == case["n_query"]
