"""Waiting-line operations on lists, after ParallelBench (arXiv 2510.04767).

They grade token dependency: a copy can be written in one parallel step, a shuffle cannot.
Indices count from 0.  Sorting is alphabetical.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence

from .base import Example, Task
from .lexicon import NAMES, OBJECTS

SHORTEST, LONGEST, LONGEST_SORT = 3, 8, 6

Edit = Callable[[list[str], int, str], list[str]]


def parse_items(text: str) -> list[str]:
    """Items of a comma-separated list; brackets and quotes around them are ignored."""
    inner = text.rsplit("[", 1)[-1].split("]", 1)[0].strip().rstrip(".")
    return [item.strip().strip("'\"") for item in inner.split(",")] if inner else []


def _items(rng: random.Random, longest: int, extra: int = 0, names: float = 0.7) -> list[str]:
    """Distinct words; a list holds names with probability ``names``, else objects."""
    pool = NAMES if rng.random() < names else OBJECTS
    return rng.sample(pool, rng.randint(SHORTEST, longest) + extra)


def _show(items: Sequence[str]) -> str:
    return ", ".join(items)


def _same_list(example: Example, text: str) -> bool:
    return parse_items(text) == parse_items(example.answer)


def _plain(
    name: str, wordings: Sequence[str], solve: Callable[[list[str], random.Random], list[str]],
    check: Callable[[Example, str], bool] = _same_list, longest: int = LONGEST, names: float = 0.7,
) -> Task:  # fmt: skip
    """An operation that needs nothing but the list."""

    def draw(rng: random.Random) -> Example:
        items = _items(rng, longest, names=names)
        prompt = rng.choice(wordings).format(_show(items))
        return Example(name, prompt, _show(solve(items, rng)), tuple(items))

    return Task(name, draw, check)


def _edited(
    name: str, wordings: Sequence[str], edit: Edit, new_slot: bool = False, anywhere: bool = False
) -> Task:
    """An operation at an index, maybe with a new word.  ``anywhere``: the index is the model's own
    choice, so that many answers are right."""

    def draw(rng: random.Random) -> Example:
        *items, word = _items(rng, LONGEST, extra=1)
        index = rng.randrange(len(items) + new_slot)
        prompt = rng.choice(wordings).format(_show(items), index=index, word=word)
        facts = (*items, word) if anywhere else (*items, index, word)
        return Example(name, prompt, _show(edit(items, index, word)), facts)

    def check(example: Example, text: str) -> bool:
        *items, word = (str(fact) for fact in example.facts)
        got = parse_items(text)
        return any(edit(items, index, word) == got for index in range(len(items) + new_slot))

    return Task(name, draw, check if anywhere else _same_list)


def _check_shuffle(example: Example, text: str) -> bool:
    got, items = parse_items(text), [str(fact) for fact in example.facts]
    return Counter(got) == Counter(items) and got != items


def _shuffled(items: list[str], rng: random.Random) -> list[str]:
    while True:
        out = rng.sample(items, len(items))
        if out != items:
            return out


def insert_at(items: list[str], index: int, word: str) -> list[str]:
    return [*items[:index], word, *items[index:]]


def remove_at(items: list[str], index: int, word: str) -> list[str]:
    return items[:index] + items[index + 1 :]


def replace_at(items: list[str], index: int, word: str) -> list[str]:
    return [*items[:index], word, *items[index + 1 :]]


TASKS = (
    _plain("copy", ["Copy this list: {}", "Repeat this list: {}", "Write the same list: {}"],
           lambda items, rng: items),
    _plain("reverse", ["Reverse this list: {}", "Write this list backwards: {}",
                       "Turn this list around: {}"], lambda items, rng: items[::-1]),
    _plain("sort", ["Sort this list: {}", "Sort alphabetically: {}", "Put in order: {}"],
           lambda items, rng: sorted(items), longest=LONGEST_SORT, names=1.0),
    _plain("shuffle", ["Shuffle this list: {}", "Mix this list up: {}",
                       "Write in another order: {}"], _shuffled, _check_shuffle),
    _edited("insert", ["Insert {word} at index {index}: {}", "Put {word} at index {index}: {}",
                       "Add {word} at index {index} in this list: {}"], insert_at, new_slot=True),
    _edited("remove", ["Remove index {index}: {}", "Delete index {index} in this list: {}",
                       "Drop the item at index {index}: {}"], remove_at),
    _edited("replace", ["Replace index {index} with {word}: {}",
                        "Change index {index} to {word}: {}",
                        "Swap in {word} at index {index} in this list: {}"], replace_at),
    _edited("insert_random", ["Insert {word} anywhere: {}", "Put {word} at a random index: {}"],
            insert_at, new_slot=True, anywhere=True),
    _edited("remove_random", ["Remove any item: {}", "Delete one random item: {}"], remove_at,
            anywhere=True),
    _edited("replace_random", ["Replace any item with {word}: {}",
                               "Change a random item to {word}: {}"], replace_at, anywhere=True),
)  # fmt: skip
