"""What slots remember: their ages, and how many of them are final."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from dllm.cache import Slots, compose
from dllm.cache.dkv import first_row
from dllm.core.canvas import Canvas


def test_slots_are_added_at_the_end_or_dropped() -> None:
    slots = Slots.empty(3)
    slots.computed(np.arange(3), 5)
    slots.changed(np.array([0]))
    for length, age in ((3, [5, 5, 5]), (5, [5, 5, 5, -1, -1]), (2, [5, 5])):
        slots.resize(length)
        assert slots.age.tolist() == age
        assert slots.pending.tolist() == [True] + [False] * (length - 1)


def decided(*steps: int) -> Canvas:
    """A text without masks whose tokens were decided in these steps."""
    canvas = Canvas.for_prompt([1, 2], len(steps) - 2, mask_id=99, pad_id=0)
    canvas.tokens[2:], canvas.masked[:] = 3, False
    canvas.commit_step[: len(steps)] = steps
    return canvas


def test_final_is_what_was_computed_after_all_that_it_reads() -> None:
    canvas = decided(-1, -1, -1, 1, 1, 1, 2, 1, 1, 1)

    def final(age: int, **how: Any) -> int:
        slots = Slots.empty(10, **how)
        slots.computed(np.arange(10), age)
        return slots.final(canvas)

    assert final(9) == 0  # attention in both directions
    assert [final(age, block_length=4) for age in (1, 2, 3)] == [0, 4, 8]
    assert [final(age, decided_first=True) for age in (1, 2, 3)] == [3, 6, 10]
    assert [final(9, block_length=4, prefix=end) for end in (0, 6, 99)] == [0, 6, 10]
    assert final(9, block_length=16) == 0


def test_where_a_region_begins_when_logits_are_shifted() -> None:
    at = [first_row(Canvas.for_prompt(np.arange(n), 4, mask_id=9, pad_id=8), Slots.empty(9, shift))
          for n in (0, 1, 2) for shift in (0, 1)]  # fmt: skip
    assert at == [0, 0, 1, 0, 2, 1]


def test_elastic_asks_no_layer_where_it_computes_everything() -> None:
    cache: Any = compose("elastic(refresh_every=1)")
    canvas = decided(-1, -1, 1, 1)
    slots = Slots.empty(4)
    plan = cache.plan(canvas, slots, np.array([2]))
    assert plan.compute.tolist() == [0, 1, 2, 3]
    assert cache.before_layer(canvas, slots, SimpleNamespace(index=0)) is None
