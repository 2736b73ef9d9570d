"""What no decoder can exceed on lists when it writes several items at once (arXiv 2510.04767).

A step that writes several items draws each from its own distribution, given what stands already.
Even with the exact distributions of the task, items that depend on one another then contradict each
other; how often follows in closed form from how many items each step writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """``accuracy``: the probability that an answer is right when every item is drawn from its exact
    distribution; ``divergence``: the least Kullback-Leibler divergence, in nats, of any decoder
    with these steps from the task's distribution, the conditional total correlation of what the
    steps write."""

    accuracy: float
    divergence: float


def limit(task: str, steps: Sequence[int]) -> Limit:
    """The limit of a list task when step i writes ``steps[i]`` items, in any order.

    ``task``: "copy"; "replace" (one item of the list, any, becomes another); "shuffle" (any order
    is right).  Lists have sum(steps) items, all different, one token each.
    """
    if not steps or min(steps) < 1:
        raise ValueError(f"every step writes at least one item, not {list(steps)}")
    try:
        return LIMITS[task](steps)
    except KeyError:
        raise ValueError(f"no limit is known for {task!r}: use {', '.join(LIMITS)}") from None


def _copy(steps: Sequence[int]) -> Limit:
    return Limit(1.0, 0.0)


def _shuffle(steps: Sequence[int]) -> Limit:
    """m items are left, each as likely at each of the s places: m! / (m - s)! of m^s draws differ
    from one another, and those are equally likely, as they should be."""
    left, log_right = sum(steps), 0.0
    for size in steps:
        log_right += math.lgamma(left + 1) - math.lgamma(left - size + 1) - size * math.log(left)
        left -= size
    return Limit(math.exp(log_right), -log_right)


def _replace(steps: Sequence[int]) -> Limit:
    """While the new item has not been written, it is as likely at each of the m places left."""
    items = left = sum(steps)
    accuracy, divergence, none_yet = 0.0, 0.0, 1.0
    for size in steps:
        p = 1 / left
        accuracy += none_yet * size * p * (1 - p) ** (size - 1)
        none_yet *= (1 - p) ** size
        joint = size * p * math.log(left) - _xlogx(1 - size * p)
        divergence += left / items * (size * -(_xlogx(p) + _xlogx(1 - p)) - joint)
        left -= size
    return Limit(accuracy, divergence)


def _xlogx(x: float) -> float:
    return x * math.log(x) if x > 0 else 0.0


LIMITS = {"copy": _copy, "replace": _replace, "shuffle": _shuffle}
