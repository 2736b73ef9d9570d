"""Closed forms against an exact decoder that is simulated over every outcome."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import permutations, product

import pytest

from dllm.eval.tasks.limits import limit

Answers = list[tuple[int, ...]]


def even_steps(items: int, per_step: int) -> tuple[int, ...]:
    """Steps of ``per_step`` items, the last with what is left."""
    full, rest = divmod(items, per_step)
    return (per_step,) * full + ((rest,) if rest else ())


def answers(task: str, n: int) -> Answers:
    """Every right answer; all are equally likely."""
    if task == "copy":
        return [tuple(range(n))]
    if task == "shuffle":
        return list(permutations(range(n)))
    return [tuple(n if i == place else i for i in range(n)) for place in range(n)]


def decoded(
    right: Answers, steps: tuple[int, ...], prefix: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], float]]:
    """What a decoder writes that knows every item's exact distribution given what it has written,
    and draws the items of a step one by one; with what probability.  Nothing follows a prefix that
    no right answer has."""
    if not steps:
        yield prefix, 1.0
        return
    low, high = len(prefix), len(prefix) + steps[0]
    possible = [answer for answer in right if answer[:low] == prefix]
    shares = [Counter(answer[i] for answer in possible) for i in range(low, high)]
    for chosen in product(*shares):
        p = math.prod(s[c] / len(possible) for s, c in zip(shares, chosen, strict=True))
        if any(answer[:high] == prefix + chosen for answer in possible):
            for whole, q in decoded(right, steps[1:], prefix + chosen):
                yield whole, p * q


@pytest.mark.parametrize("task", ["copy", "replace", "shuffle"])
@pytest.mark.parametrize(
    "steps", [(1,), (4,), (1, 1, 1, 1), (2, 2), (3, 1), (1, 3), (2, 1, 2), (5,), (1, 2, 3)], ids=str
)
def test_the_limit_is_what_an_exact_decoder_reaches(task: str, steps: tuple[int, ...]) -> None:
    right = answers(task, sum(steps))
    written = dict(decoded(right, steps))
    result = limit(task, steps)
    assert result.accuracy == pytest.approx(sum(written.values()))
    divergence = sum(math.log(1 / len(right) / written[a]) for a in right) / len(right)
    assert result.divergence == pytest.approx(divergence, abs=1e-12)


def test_known_values() -> None:
    assert limit("shuffle", (2,)).accuracy == pytest.approx(0.5)
    assert limit("replace", (15,)).accuracy == pytest.approx((14 / 15) ** 14)
    assert limit("shuffle", (1,) * 15).accuracy == pytest.approx(1)
    assert limit("shuffle", (1,) * 15).divergence == pytest.approx(0, abs=1e-12)
    assert even_steps(15, 4) == (4, 4, 4, 3)


def test_lists_of_fifteen() -> None:
    """Percent, with 1, 2, 3, 5 and 15 items per step."""
    cells = {
        task: [round(100 * limit(task, even_steps(15, k)).accuracy, 1) for k in (1, 2, 3, 5, 15)]
        for task in ("copy", "replace", "shuffle")
    }
    assert cells == {
        "copy": [100.0, 100.0, 100.0, 100.0, 100.0],
        "replace": [100.0, 92.7, 77.6, 65.7, 38.1],
        "shuffle": [100.0, 31.8, 5.3, 0.6, 0.0],
    }


@pytest.mark.parametrize(("task", "steps"), [("sort", (2,)), ("copy", ()), ("copy", (2, 0))])
def test_what_has_no_limit_says_so(task: str, steps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"use copy|at least one"):
        limit(task, steps)
