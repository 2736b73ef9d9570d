"""Small grids: Latin squares to invent and 4 x 4 sudokus to complete; rows end in " /"."""

import random
from collections.abc import Sequence

from .base import Example, Task
from .lexicon import LETTERS

SIZE, GIVENS = 4, 12
Grid = tuple[tuple[str, ...], ...]


def show_grid(grid: Sequence[Sequence[str]]) -> str:
    return " / ".join(" ".join(row) for row in grid)


def parse_grid(text: str) -> Grid:
    rows = (row.replace(",", " ").split() for row in text.replace("\n", " / ").split("/"))
    return tuple(tuple(row) for row in rows if row)


def _is_latin(grid: Grid, symbols: set[str]) -> bool:
    return len(grid) == SIZE and all(
        len(line) == SIZE and set(line) == symbols for line in (*grid, *zip(*grid, strict=False))
    )


def _draw_latin(rng: random.Random) -> Example:
    symbols = rng.sample(LETTERS, SIZE)
    wording = rng.choice(["Make a Latin square: {}", "Write a Latin square with {}"])
    prompt = wording.format(" ".join(symbols))
    rows, columns = rng.sample(range(SIZE), SIZE), rng.sample(range(SIZE), SIZE)
    grid = [[symbols[(r + c) % SIZE] for c in columns] for r in rows]
    return Example("latin", prompt, show_grid(grid), tuple(symbols))


def _check_latin(example: Example, text: str) -> bool:
    return _is_latin(parse_grid(text), {str(symbol) for symbol in example.facts})


def _solved_sudoku(rng: random.Random) -> Grid:
    """Shuffling bands, rows in bands, stacks, columns in stacks and digits of one solved grid."""
    digits = rng.sample("1234", 4)
    base = (0, 1, 2, 3), (2, 3, 0, 1), (1, 0, 3, 2), (3, 2, 1, 0)

    def order() -> list[int]:
        return [line for band in rng.sample([[0, 1], [2, 3]], 2) for line in rng.sample(band, 2)]

    rows, columns = order(), order()
    return tuple(tuple(digits[base[r][c]] for c in columns) for r in rows)


def _draw_sudoku(rng: random.Random) -> Example:
    solved = _solved_sudoku(rng)
    blanks = set(rng.sample(range(SIZE * SIZE), SIZE * SIZE - GIVENS))
    given = tuple(
        tuple("0" if SIZE * r + c in blanks else solved[r][c] for c in range(SIZE))
        for r in range(SIZE)
    )
    wording = rng.choice(["Solve this sudoku: {}", "Complete this sudoku: {}"])
    return Example("sudoku", wording.format(show_grid(given)), show_grid(solved), given)


def _check_sudoku(example: Example, text: str) -> bool:
    """Valid rows, columns and boxes that keep the givens (a puzzle may have two solutions)."""
    grid = parse_grid(text)
    if not _is_latin(grid, set("1234")):
        return False
    boxes = all(
        {grid[r][c], grid[r][c + 1], grid[r + 1][c], grid[r + 1][c + 1]} == set("1234")
        for r in (0, 2)
        for c in (0, 2)
    )
    given = parse_grid(show_grid(example.facts))  # type: ignore[arg-type]
    kept = all(
        want in ("0", have)
        for row, other in zip(given, grid, strict=True)
        for want, have in zip(row, other, strict=True)
    )
    return boxes and kept


TASKS = (Task("latin", _draw_latin, _check_latin), Task("sudoku", _draw_sudoku, _check_sudoku))
