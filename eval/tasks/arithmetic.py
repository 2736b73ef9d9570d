"""Arithmetic with worked steps: bare sums, and word problems of one and of two steps."""

import random
import re

from .base import Example, Task
from .lexicon import GAINS, LOSSES, NAMES, OBJECTS

LARGEST = 99  # operands; a last sum may reach twice that

Step = tuple[int, str, int]


def _number(rng: random.Random, low: int = 1, high: int = LARGEST) -> int:
    return rng.randint(low, max(low, high))


def _columns(left: int, op: str, right: int) -> str:
    """One operation, column by column, ones first: ``27 + 35: 7 + 5 = 12, 2 + 3 + 1 = 6: 62.``

    A borrow shows as a ten in front of the ones and as one less among the tens.
    """
    (tens, ones), (more, fewer) = divmod(left, 10), divmod(right, 10)
    if op == "+":
        carry = " + 1" if ones + fewer > 9 else ""
        total = tens + more + (1 if carry else 0)
        steps = f"{ones} + {fewer} = {ones + fewer}, {tens} + {more}{carry} = {total}"
        return f"{left} + {right}: {steps}: {left + right}."
    if ones < fewer:
        tens, ones = tens - 1, ones + 10
    steps = f"{ones} - {fewer} = {ones - fewer}, {tens} - {more} = {tens - more}"
    return f"{left} - {right}: {steps}: {left - right}."


def _worked(*steps: Step) -> str:
    """All operations column by column, then ``The answer is 62.``"""
    left, op, right = steps[-1]
    result = left + right if op == "+" else left - right
    return " ".join([*(_columns(*step) for step in steps), f"The answer is {result}."])


def _draw_fact(rng: random.Random) -> Example:
    """One column: what all other arithmetic is made of.  There are few, so the test split holds
    out wordings of them, not the columns."""
    right = rng.randint(0, 9)
    if rng.random() < 0.5:
        left, carry = rng.randint(0, 9), rng.random() < 0.3
        column = f"{left} + {right}" + (" + 1" if carry else "")
        result = left + right + carry
    else:
        result = rng.randint(0, 9)
        left, column = result + right, f"{result + right} - {right}"
    wording = rng.choice(["What is {}?", "Compute {}.", "{} = ?"])
    return Example("fact", wording.format(column), f"{column} = {result}.", (column, wording))


def _draw_sum(rng: random.Random) -> Example:
    if rng.random() < 0.5:
        step = (_number(rng), "+", _number(rng))
    else:
        left = _number(rng)
        step = (left, "-", _number(rng, high=left))
    left, op, right = step
    wording = rng.choice(
        ["What is {} {} {}?", "Compute {} {} {}.", "How much is {} {} {}?", "{} {} {} = ?"]
    )
    return Example("sum", wording.format(left, op, right), _worked(step), step)


def _event(rng: random.Random, held: int, last: bool) -> tuple[str, Step, int]:
    """A sentence about gaining or losing, its step, and what is held afterwards."""
    room = LARGEST if last else LARGEST - held
    if held < 2 or (room > 0 and rng.random() < 0.5):
        amount = _number(rng, high=room)
        text = rng.choice(["{n} {g} {k} more.", "Then {n} {g} {k} more.", "{n} {g} {k} {o}."])
        step = (held, "+", amount)
    else:
        amount = _number(rng, high=held)
        text = rng.choice(["{n} {l} {k}.", "Then {n} {l} {k}.", "{n} {l} {k} {o}."])
        step = (held, "-", amount)
    words = text.replace("{k}", str(amount))
    words = words.replace("{g}", rng.choice(GAINS)).replace("{l}", rng.choice(LOSSES))
    return words, step, held + amount if step[1] == "+" else held - amount


def _draw_story(rng: random.Random, steps: int) -> Example:
    name, objects, start = rng.choice(NAMES), rng.choice(OBJECTS), _number(rng, high=LARGEST - 1)
    sentences, worked, held = [f"{name} has {start} {objects}."], [], start
    for i in range(steps):
        words, step, held = _event(rng, held, last=i == steps - 1)
        sentences.append(words.replace("{n}", name).replace("{o}", objects))
        worked.append(step)
    questions = [
        f"How many {objects} does {name} have?",
        f"How many {objects} does {name} have now?",
        f"How many {objects} are left?",
    ]
    sentences.append(rng.choice(questions))
    return Example(f"story{steps}", " ".join(sentences), _worked(*worked), tuple(worked))


def _draw_comparison(rng: random.Random) -> Example:
    (name, other), objects, start = (
        rng.sample(NAMES, 2), rng.choice(OBJECTS), _number(rng, 2, LARGEST - 1),
    )  # fmt: skip
    if rng.random() < 0.5:
        amount, op, word = _number(rng, high=LARGEST - start), "+", "more"
    else:
        amount, op, word = _number(rng, high=start - 1), "-", "fewer"
    theirs = start + amount if op == "+" else start - amount
    worked = ((start, op, amount), (start, "+", theirs))
    prompt = (
        f"{name} has {start} {objects}. {other} has {amount} {word} than {name}. "
        f"How many {objects} do they have together?"
    )
    return Example("story2", prompt, _worked(*worked), worked)


def final_number(text: str) -> int | None:
    """The number after the last "answer is", or the last number of the text."""
    result = re.findall(r"answer is (-?\d+)", text) or re.findall(r"-?\d+", text)
    return int(result[-1]) if result else None


def _check(example: Example, text: str) -> bool:
    return final_number(text) == final_number(example.answer)


TASKS = (
    Task("fact", _draw_fact, _check),
    Task("sum", _draw_sum, _check),
    Task("story1", lambda rng: _draw_story(rng, 1), _check),
    Task("story2", lambda rng: (
        _draw_comparison(rng) if rng.random() < 0.25 else _draw_story(rng, 2)
    ), _check),
)  # fmt: skip
