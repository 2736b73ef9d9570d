"""Plans of every cache on one small row, worked out by hand."""

from collections.abc import Iterator

import numpy as np
import pytest

from dllm import cache as caches
from dllm.cache import Cache, Plan, Slots
from dllm.cache.base import complete_plan
from dllm.cache.dkv import neighbours
from dllm.core.canvas import Canvas, IntArray
from dllm.core.capabilities import DECIDED_FIRST, FORESIGHT

from ..table import EOS, MASK

# A prompt of 4 and 12 masks in blocks of 4: the block of each step, and what the step decides.
STEPS = [(4, [5]), (4, [4, 6]), (4, [7]), (8, [9]), (8, [8]), (8, [10, 11]), (12, [12, 14])]

ALL = "0-15"
# What is computed in each step, and "/ what is read" where it is named.
PLANS = {
    "none": ["0-7"] * 3 + ["0-11"] * 3 + [ALL],  # attention is causal between blocks here
    "dpad(dropout=uniform, number=99)": [
        "0-15 / 0-15", "4-15 / 0-15", "4-15 / 0-15", "0-15 / 0-15", "8-15 / 0-15", "8-15 / 0-15",
        "0-15 / 0-15",
    ],
    "prefix": [ALL, "4-15", "4-15", ALL, "8-15", "8-15", ALL],
    "dual": [ALL, "4-7", "4-7", ALL, "8-11", "8-11", ALL],
    "dkv(refresh_every=4)": [ALL, "4-15", "4,6-15", "7-15", ALL, "8,10-15", "10-15"],
    "dkv_prefill": [ALL, *["4-15"] * 6],
    "dkv_pd(refresh_every=3)": [ALL, "4-15", "4,6-15", "4-15", "8-15", "8,10-15", "4-15"],
    "dkv_greedy(refresh_every=3, window=2)": [
        ALL, "4-10", "4,6-9", ALL, "8-11", "8,10-15", ALL,
    ],
    "window_diffusion(refresh_every=4, active=4, window=10)": [
        ALL, "4-8 / 0-14", "4,6-10 / 0-14", "4,6-11 / 0-14", ALL, "8,10-13 / 0-15", "10-15 / 0-15",
    ],
    "window_diffusion(refresh_every=4, active=4, window=10, far=False)": [
        "0-13 / 0-13", "4-8 / 0-13", "4,6-10 / 0-13", "4,6-11 / 0-13",
        "0-15 / 0-15", "8,10-13 / 0-15", "10-15 / 0-15",
    ],
    "dllm_cache(6, 3)": [ALL] * 7,  # its layers compute less
    "dsb(refresh_after=5, before=3)": [ALL, "1-7", "1-7", "4-11", ALL, "5-11", "8-15"],
    "dcd(refresh_after=5)": [ALL, "4-9", "4-9", ALL, "6-13", "6-13", ALL],
    "vicinity(before=2, after=2, warmup=1)": [ALL, ALL, "2-9", ALL, "6-13", "6-13", ALL],
    "elastic(beta=4)": [ALL, "4-7", "4,6-7", "7-11", "8-11", "8,10-11", "10-15"],
    "delayed(refresh_every=3)": [ALL, "4-15", ALL, ALL, "4-15", ALL, ALL],
    "d2f": ["0-7 / 0-7", "4-7 / 0-7", "4-7 / 0-7", "4-11 / 0-11", "8-11 / 0-11", "8-11 / 0-11",
            "8-15 / 0-15"],
    "block": ["0-7 / 0-7", "4-7 / 0-7", "4-7 / 0-7", "4-11 / 0-11", "8-11 / 0-11", "8-11 / 0-11",
              "8-15 / 0-15"],
    "wedlm": ["0-7 / 0-7", "4-7 / 0-7", "4-7 / 0-7", "7-11 / 0-11", "8-11 / 0-11", "8-11 / 0-11",
              "10-15 / 0-15"],
}  # fmt: skip
# The same where the row to the left scores a position.
SHIFTED = {
    "dual": [ALL, "3-7", "4-7", ALL, "7-11", "8-11", ALL],
    "dkv(refresh_every=4)": [ALL, "3-15", "4,6-15", "7-15", ALL, "8-15", "10-15"],
    "dkv_prefill": [ALL, *["3-15"] * 6],
    "dcd(refresh_after=5)": [ALL, "3-9", "3-9", ALL, "5-13", "5-13", ALL],
    "vicinity(before=2, after=2, warmup=1)": [ALL, ALL, "1-9", ALL, "5-13", "5-13", ALL],
}


def plans(cache: Cache, shift: int = 0) -> Iterator[Plan]:
    """What ``cache`` plans for `STEPS`, closed as the engine does."""
    canvas = Canvas.for_prompt(np.arange(4), 12, mask_id=MASK, pad_id=EOS)
    first = DECIDED_FIRST in cache.needs
    slots = Slots.empty(16, shift, block_length=0 if first else 4, decided_first=first)
    for low, decided in STEPS:
        if canvas.window != (low, low + 4):
            canvas.open_window(low, low + 4)
        masks = canvas.masks()
        asked = np.array(decided) if FORESIGHT in cache.needs else masks
        plan = cache.plan(canvas, slots, asked)
        asked = asked if plan.answers is None else np.intersect1d(asked, plan.answers)
        pending = slots.waiting(16) if cache.recompute_pending else masks[:0]
        yield (plan := complete_plan(plan, asked, slots, pending))
        positions = np.array(decided)
        slots.computed(plan.compute, canvas.step)
        canvas.commit(positions, positions, np.zeros(len(positions), np.float32))
        slots.changed(positions)
        canvas.step, canvas.block_step, canvas.nfe = (
            canvas.step + 1, canvas.block_step + 1, canvas.nfe + 1,
        )  # fmt: skip


def runs(positions: IntArray) -> str:
    """Ascending positions as ``"0-3,7"``."""
    pieces = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in pieces if len(p))


def table(cache: Cache, shift: int = 0) -> list[str]:
    return [
        runs(plan.compute) + ("" if plan.read is None else f" / {runs(plan.read)}")
        for plan in plans(cache, shift)
    ]


@pytest.mark.parametrize("spec", PLANS)
def test_plans(spec: str) -> None:
    assert table(caches.compose(spec)) == PLANS[spec]


@pytest.mark.parametrize("spec", SHIFTED)
def test_plans_where_logits_are_shifted(spec: str) -> None:
    assert table(caches.compose(spec), shift=1) == SHIFTED[spec]


@pytest.mark.parametrize("per_step", [1, 2, 3])
def test_a_phase_that_ends_early_is_followed_by_a_whole_one(per_step: int) -> None:
    """A phase: one refresh and ``refresh_every - 1`` steps, or fewer, as the window allows."""
    cache = caches.compose("window_diffusion(refresh_every=8, active=4, window=16)")
    canvas = Canvas.for_prompt(np.arange(4), 96, mask_id=MASK, pad_id=EOS)
    slots, refreshes = Slots.empty(100), []
    canvas.open_window(4, 100)
    for step in range(96 // per_step):
        plan = cache.plan(canvas, slots, canvas.masks())
        refreshes += [step] if plan.refresh else []
        at = canvas.masks()[:per_step]
        canvas.commit(at, at, np.zeros(len(at), np.float32))
        canvas.step += 1
    # the window is that of the first step after the refresh: then 12 commits to its end
    lengths = {1: 8, 2: 8, 3: 6}
    assert set(np.diff(refreshes)) == {lengths[per_step]}


def test_commits_restart_the_clock() -> None:
    cache = caches.compose("dsb(refresh_every=5, refresh_after=6)")
    canvas = Canvas.for_prompt(np.arange(4), 40, mask_id=MASK, pad_id=EOS)
    slots, refreshes = Slots.empty(44), []
    canvas.open_window(4, 44)
    for step, count in enumerate([2, 2, 2, 0, 0, 0, 0, 0, 0, 3, 3, 1, 1, 1]):
        refreshes += [step] if cache.plan(canvas, slots, canvas.masks()).refresh else []
        at = canvas.masks()[:count]
        canvas.commit(at, at, np.zeros(count, np.float32))
        canvas.step += 1
    assert refreshes == [0, 3, 8, 11]


@pytest.mark.parametrize(("arguments", "shift", "expected"), [
    ("", 0, "10-32"), ("", 1, "9-32"), ("lookahead=False", 1, "9-31"), ("delay=0", 0, "15-30"),
    ("mode=prefix", 0, "10-39"), ("delay=9", 0, "4-39"), ("delay=0, mode=prefix", 1, "14-39"),
])  # fmt: skip
def test_dcd_begins_at_the_old_left_edge(arguments: str, shift: int, expected: str) -> None:
    """The window was [12, 28) and is [15, 31) now; the prompt ends at 4, the row at 40."""
    cache = caches.compose(f"dcd({arguments})")
    canvas = Canvas.for_prompt(np.arange(4), 36, mask_id=MASK, pad_id=EOS)
    slots = Slots.empty(40, shift)
    canvas.open_window(12, 28)
    assert cache.plan(canvas, slots, canvas.masks()).refresh
    canvas.commit(np.arange(12, 15), np.arange(3), np.zeros(3, np.float32))
    canvas.step, canvas.block_step, canvas.window = 1, 1, (15, 31)
    assert runs(cache.plan(canvas, slots, canvas.masks()).compute) == expected


@pytest.mark.parametrize(("center", "targets", "each", "expected"), [
    ([4], [4], 1, [3]),  # left of two that are equally near
    ([4], [4], 3, [2, 3, 5]),
    ([4], [4], 9, [0, 1, 2, 3, 5, 6]),
    ([4, 3], [3, 4], 1, [2, 5]),  # 2 is as near to 3 as 4, a target, and 5 is taken
    ([3, 3], [3], 1, [2, 4]),
    ([], [3], 2, []),
])  # fmt: skip
def test_neighbours(center: list[int], targets: list[int], each: int, expected: list[int]) -> None:
    canvas = Canvas.for_prompt(np.array([1, 2]), 8, mask_id=MASK, pad_id=EOS)
    canvas.give(9, np.array([5]))
    at = (np.array(part, np.int64) + 2 for part in (center, targets))
    found = neighbours(canvas, *at, each)
    assert sorted((found - 2).tolist()) == expected


def test_every_cache_has_a_plan() -> None:
    assert {spec.partition("(")[0] for spec in PLANS} == {c.name for c in caches.available()}
