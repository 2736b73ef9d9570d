"""Tasks after ParallelBench (arXiv 2510.04767) for any model: longer prompts, formats to keep.

What is asked is that paper's (queues of people, Latin squares, sudokus, sentences from given
words); wordings, names, words and checkers are this library's, and sorting is by last name, as
asked.  Each list and grid task shows one solved example as an earlier turn.  Two readings of an
answer: loose (whatever list can be found in it) and strict (nothing but the list, written as
asked).  Sentences are checked for the words and for their form, not for grammar.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .base import Example, Task
from .grids import _check_sudoku, _latin, _solved_sudoku, parse_grid
from .lexicon import LETTERS, NAMES
from .lists import insert_at, remove_at, replace_at

SURNAMES = (
    "Abbott Adler Baker Barnes Bauer Becker Bell Brandt Carter Chen Cole Cruz Dawson Diaz Dixon "
    "Ellis Evans Fischer Fox Garcia Gibson Grant Gupta Hansen Hayes Hoffman Ivanov Jensen Kaya "
    "Keller Khan Klein Lang Larsen Lee Lopez Marsh Meyer Moreau Morris Nolan Novak Olsen Ortiz "
    "Owens Park Pereira Quist Reyes Rossi Sato Schmidt Silva Singh Stone Tanaka Torres Ueda Vargas "
    "Vogel Walsh Weber Wolf Yilmaz Zhang Zimmer"
).split()
SCENES = tuple(
    scene.split()
    for scene in (
        "dog park ball run leash grass", "chef kitchen knife onion soup spoon",
        "teacher school pencil lesson board student", "farmer field tractor corn barn rain",
        "sailor boat harbor wind rope wave", "doctor hospital patient nurse fever bed",
        "child beach sand bucket shell sun", "writer desk letter ink lamp paper",
        "train station ticket platform whistle seat", "painter brush canvas color wall ladder",
        "baker oven bread flour morning shop", "hiker mountain trail map boots tent",
        "singer stage song piano crowd light", "gardener rose soil shovel water fence",
        "driver car road bridge traffic radio", "cat sofa window bird milk nap",
    )
)  # fmt: skip
QUEUE = "A help desk keeps its queue as a JSON list of names.  {}\n\nQueue: {}\n\nAnswer with the "
QUEUE += "resulting JSON list and nothing else."
SHORT, LONG = (3, 6), (15, 15)  # people in a queue; where many are, contradictions show
LEVELS = {"easy": 1, "medium": 2, "hard": 4}  # scenes that the four words come from

Sizes = tuple[int, int]
Edit = Callable[[list[str], int, str], list[str]]
Check = Callable[[Example, str], bool]


@dataclass(frozen=True)
class ChatExample(Example):
    """``history``: turns before the prompt, (role, text)."""

    history: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ParallelTask(Task):
    """``check`` reads an answer loosely; ``strict`` wants its form as well."""

    strict: Check


def show(items: Sequence[str]) -> str:
    """A list as the prompts show it."""
    return json.dumps(list(items))


def loose_items(text: str) -> list[str]:
    """Items between the last "[" and the "]" after it, without quotes."""
    inner = text.rsplit("[", 1)[-1].split("]", 1)[0]
    items = (item.strip().strip("'\"") for item in inner.split(","))
    return [item for item in items if item]


def strict_items(text: str) -> list[str] | None:
    """Items of an answer that is one JSON list, written as in the prompt, and nothing else."""
    try:
        result = json.loads(text.strip())
    except ValueError:
        return None
    plain = isinstance(result, list) and all(isinstance(item, str) for item in result)
    return result if plain and show(result) == text.strip() else None


def _people(rng: random.Random, n: int) -> list[str]:
    firsts, lasts = rng.sample(NAMES, n), rng.sample(SURNAMES, n)
    return [f"{first} {last}" for first, last in zip(firsts, lasts, strict=True)]


def _queue_task(
    name: str,
    sentence: str,
    solve: Callable[[list[str], int, str, random.Random], list[str]],
    valid: Callable[[list[str], int, str, list[str]], bool],
    new_slot: bool = False,
    sizes: Sizes = SHORT,
) -> ParallelTask:
    """``sentence`` may speak of {index} (from 0) and {word}."""

    def once(rng: random.Random) -> tuple[str, list[str], tuple[object, ...]]:
        *items, word = _people(rng, rng.randint(*sizes) + 1)
        index = rng.randrange(len(items) + new_slot)
        prompt = QUEUE.format(sentence.format(index=index, word=word), show(items))
        return prompt, solve(items, index, word, rng), (*items, index, word)

    def draw(rng: random.Random) -> Example:
        shown, solved, _ = once(rng)
        prompt, answer, facts = once(rng)
        history = (("user", shown), ("assistant", show(solved)))
        return ChatExample(name, prompt, show(answer), facts, history)

    def judge(example: Example, got: list[str] | None) -> bool:
        *items, index, word = example.facts
        assert isinstance(index, int)
        return got is not None and valid([str(item) for item in items], index, str(word), got)

    return ParallelTask(
        name, draw, lambda e, text: judge(e, loose_items(text)), "parallel",
        lambda e, text: judge(e, strict_items(text)),
    )  # fmt: skip


def _exact(
    name: str, sentence: str, edit: Edit, new_slot: bool = False, sizes: Sizes = SHORT
) -> ParallelTask:
    """One answer is right."""
    return _queue_task(
        name, sentence, lambda items, index, word, rng: edit(items, index, word),
        lambda items, index, word, got: got == edit(items, index, word), new_slot, sizes,
    )  # fmt: skip


def _any(
    name: str, sentence: str, edit: Edit, new_slot: bool = False, sizes: Sizes = SHORT
) -> ParallelTask:
    """The edit at any index is right."""

    def valid(items: list[str], index: int, word: str, got: list[str]) -> bool:
        return any(edit(items, i, word) == got for i in range(len(items) + new_slot))

    return _queue_task(
        name, sentence, lambda items, index, word, rng: edit(items, index, word), valid, new_slot,
        sizes,
    )  # fmt: skip


def _by_last_name(items: list[str], index: int, word: str) -> list[str]:
    return sorted(items, key=lambda name: name.split()[::-1])


def _shuffled(items: list[str], index: int, word: str, rng: random.Random) -> list[str]:
    while (result := rng.sample(items, len(items))) == items:
        pass
    return result


def _is_shuffle(items: list[str], index: int, word: str, got: list[str]) -> bool:
    return Counter(got) == Counter(items) and got != items


def _grid_task(
    name: str, draw_one: Callable[[random.Random], Example], check: Check, form: str
) -> ParallelTask:
    """``form``: a regular expression that one line of a strict answer matches, four times."""

    def draw(rng: random.Random) -> Example:
        shown, asked = draw_one(rng), draw_one(rng)
        history = (("user", shown.prompt), ("assistant", shown.answer))
        return ChatExample(name, asked.prompt, asked.answer, asked.facts, history)

    def strict(example: Example, text: str) -> bool:
        lines = text.strip().split("\n")
        formed = len(lines) == 4 and all(re.fullmatch(form, line) for line in lines)
        return formed and check(example, text)

    return ParallelTask(name, draw, check, "parallel", strict)


def _draw_latin(rng: random.Random) -> Example:
    symbols = rng.sample(LETTERS, 4)
    prompt = (
        f"Write a Latin square of size 4 with the symbols {', '.join(symbols)}: every row and "
        "every column holds each symbol once.  Answer with four lines, symbols separated by commas."
    )
    answer = "\n".join(",".join(row) for row in _latin(rng, symbols))
    return Example("pb_latin", prompt, answer, tuple(symbols))


def _check_latin(example: Example, text: str) -> bool:
    grid, symbols = parse_grid(text.strip()), set(map(str, example.facts))
    square = len(grid) == 4 and all(len(row) == 4 for row in grid)
    return square and all(set(line) == symbols for line in (*grid, *zip(*grid, strict=True)))


def _draw_sudoku(rng: random.Random) -> Example:
    solved, blanks = _solved_sudoku(rng), set(rng.sample(range(16), 4))
    given = tuple(
        tuple("0" if 4 * r + c in blanks else digit for c, digit in enumerate(row))
        for r, row in enumerate(solved)
    )
    prompt = (
        "Fill in this 4x4 sudoku: each row, column and 2x2 box holds 1 to 4 once, 0 is empty.  "
        "Answer with four lines of four digits only.\n\n" + "\n".join("".join(row) for row in given)
    )
    return Example("pb_sudoku", prompt, "\n".join("".join(row) for row in solved), given)


def _check_digits(example: Example, text: str) -> bool:
    lines = [re.sub(r"[\s,|]", "", line) for line in text.strip().split("\n")]
    grid = "\n".join(" ".join(line) for line in lines if line)
    return _check_sudoku(example, grid)


def _sentence_task(level: str) -> ParallelTask:
    name = f"pb_words_{level}"

    def draw(rng: random.Random) -> Example:
        scenes = rng.sample(SCENES, LEVELS[level])
        words = [word for scene in scenes for word in rng.sample(scene, 4 // len(scenes))]
        rng.shuffle(words)
        listed = f"{', '.join(words[:-1])} and {words[-1]}"
        prompt = f"Write one sentence that makes sense and uses the words {listed}."
        return Example(name, prompt, _template(words), tuple(sorted(words)))

    return ParallelTask(name, draw, includes_words, "parallel", is_sentence)


def _template(words: Sequence[str]) -> str:
    """A sentence that passes: a reference, not an example of style."""
    first, *middle, last = words
    return f"We saw the {first} near the {', the '.join(middle)} and finally the {last}."


def includes_words(example: Example, text: str) -> bool:
    """Every word is there, as it is or with a regular ending."""
    result = re.findall(r"[a-z]+", text.lower())

    def there(word: str) -> bool:
        stem = word.removesuffix("e")
        endings = (word, word + "s", word + "es", stem + "ing", stem + "ed", stem + "er",
                   word + word[-1] + "ing", word + word[-1] + "ed")  # fmt: skip
        return any(other in endings for other in result)

    return all(there(str(word)) for word in example.facts)


def is_sentence(example: Example, text: str) -> bool:
    """The words are there, in one sentence: a capital, one full stop, enough other words to hold
    them together, no word three times in a row."""
    line = text.strip()
    words = re.findall(r"[\w'’-]+", line.lower())
    formed = re.fullmatch(r"[A-Z][^.!?\n]*[.!?]", line) is not None
    other = len(words) - len(example.facts)
    stutters = any(len(set(words[i : i + 3])) == 1 for i in range(len(words) - 2))
    return formed and 3 <= other <= 36 and not stutters and includes_words(example, line)


def _queues(end: str = "", sizes: Sizes = SHORT) -> tuple[ParallelTask, ...]:
    """The tasks on queues of some sizes; their names end in ``end``."""

    def exact(name: str, sentence: str, edit: Edit, new_slot: bool = False) -> ParallelTask:
        return _exact(f"pb_{name}{end}", sentence, edit, new_slot, sizes)

    def any_(name: str, sentence: str, edit: Edit, new_slot: bool = False) -> ParallelTask:
        return _any(f"pb_{name}{end}", sentence, edit, new_slot, sizes)

    other = "Put the queue into another order."
    return (
        exact("copy", "Nobody came or left: repeat the queue.", lambda items, *_: items),
        exact("reverse", "Turn the queue around.", lambda items, *_: items[::-1]),
        exact("sort", "Sort the queue by last name.", _by_last_name),
        exact("insert", "Insert {word} at index {index}, counting from 0.", insert_at, True),
        exact("remove", "Remove the person at index {index}, counting from 0.", remove_at),
        exact("replace", "Put {word} in place of index {index}, counting from 0.", replace_at),
        _queue_task(f"pb_shuffle{end}", other, _shuffled, _is_shuffle, sizes=sizes),
        any_("insert_random", "Insert {word} at an index of your choice.", insert_at, True),
        any_("remove_random", "Remove one person of your choice.", remove_at),
        any_("replace_random", "Put {word} in place of one person of your choice.", replace_at),
    )


PARALLEL: dict[str, ParallelTask] = {
    task.name: task
    for task in (
        *_queues(),
        *_queues("_15", LONG),
        _grid_task("pb_latin", _draw_latin, _check_latin, r"[A-Z](,[A-Z]){3}"),
        _grid_task("pb_sudoku", _draw_sudoku, _check_digits, r"[1-4]{4}"),
        *(_sentence_task(level) for level in LEVELS),
    )
}
