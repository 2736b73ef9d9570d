"""Arithmetic with worked steps: bare sums, and word problems of one and of two steps."""

from __future__ import annotations

import random
import re

from .base import Example, Task
from .lexicon import GAINS, LOSSES, NAMES, OBJECTS

LARGEST = 99  # operands that stand in the prompt


def _number(rng: random.Random, low: int = 1, high: int = LARGEST) -> int:
    return rng.randint(low, max(low, high))


def _worked(*steps: tuple[int, str, int]) -> str:
    """``23 + 12 = 35. 35 - 5 = 30. The answer is 30.``"""
    lines, result = [], 0
    for left, op, right in steps:
        result = left + right if op == "+" else left - right
        lines.append(f"{left} {op} {right} = {result}.")
    return " ".join([*lines, f"The answer is {result}."])


def _draw_sum(rng: random.Random) -> Example:
    if rng.random() < 0.5:
        step = (_number(rng, high=2 * LARGEST), "+", _number(rng))
    else:
        left = _number(rng, 2, 2 * LARGEST)
        step = (left, "-", _number(rng, high=min(left, LARGEST)))
    left, op, right = step
    wording = rng.choice(
        ["What is {} {} {}?", "Compute {} {} {}.", "How much is {} {} {}?", "{} {} {} = ?"]
    )
    return Example("sum", wording.format(left, op, right), _worked(step), step)


def _event(rng: random.Random, held: int) -> tuple[str, tuple[int, str, int], int]:
    """A sentence about gaining or losing, its step, and what is held afterwards."""
    if held < 2 or rng.random() < 0.5:
        amount = _number(rng)
        text = rng.choice(["{n} {g} {k} more.", "Then {n} {g} {k} more.", "{n} {g} {k} {o}."])
        step = (held, "+", amount)
    else:
        amount = _number(rng, high=min(held, LARGEST))
        text = rng.choice(["{n} {l} {k}.", "Then {n} {l} {k}.", "{n} {l} {k} {o}."])
        step = (held, "-", amount)
    words = text.replace("{k}", str(amount))
    words = words.replace("{g}", rng.choice(GAINS)).replace("{l}", rng.choice(LOSSES))
    return words, step, held + amount if step[1] == "+" else held - amount


def _draw_story(rng: random.Random, steps: int) -> Example:
    name, objects, start = rng.choice(NAMES), rng.choice(OBJECTS), _number(rng)
    sentences, worked, held = [f"{name} has {start} {objects}."], [], start
    for _ in range(steps):
        words, step, held = _event(rng, held)
        sentences.append(words.replace("{n}", name).replace("{o}", objects))
        worked.append(step)
    sentences.append(
        rng.choice(
            [
                f"How many {objects} does {name} have?",
                f"How many {objects} does {name} have now?",
                f"How many {objects} are left?",
            ]
        )
    )
    return Example(f"story{steps}", " ".join(sentences), _worked(*worked), tuple(worked))


def _draw_comparison(rng: random.Random) -> Example:
    (name, other), objects, start = rng.sample(NAMES, 2), rng.choice(OBJECTS), _number(rng)
    if start < 2 or rng.random() < 0.5:
        amount, op, word = _number(rng), "+", "more"
    else:
        amount, op, word = _number(rng, high=start - 1), "-", "fewer"
    theirs = start + amount if op == "+" else start - amount
    worked = ((start, op, amount), (start, "+", theirs))
    prompt = (
        f"{name} has {start} {objects}. {other} has {amount} {word} than {name}. "
        f"How many {objects} do they have together?"
    )
    return Example("story2", prompt, _worked(*worked), worked)


def _draw_two_steps(rng: random.Random) -> Example:
    return _draw_comparison(rng) if rng.random() < 0.25 else _draw_story(rng, 2)


def final_number(text: str) -> int | None:
    """The number after the last "answer is", or the last number of the text."""
    found = re.findall(r"answer is (-?\d+)", text) or re.findall(r"-?\d+", text)
    return int(found[-1]) if found else None


def _check(example: Example, text: str) -> bool:
    return final_number(text) == final_number(example.answer)


TASKS = (
    Task("sum", _draw_sum, _check, "arithmetic"),
    Task("story1", lambda rng: _draw_story(rng, 1), _check, "arithmetic"),
    Task("story2", _draw_two_steps, _check, "arithmetic"),
)
