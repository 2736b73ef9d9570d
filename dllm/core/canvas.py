"""One sequence while it is being written.

A `Canvas` is a row of token ids with a boolean beside each that says whether it is still undecided.
It knows nothing about models, samplers or other rows; there is no batch dimension anywhere in it.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]

PROPOSAL, SELECTION, SCHEDULE, PATH = 0, 1, 2, 3  # purposes of noise, in drawing order
PURPOSES = 4
FED = 1 << 31  # stream of the ids that undecided positions hold under uniform noise, plus the row

S = TypeVar("S")

# (stream, step, positions) -> uniform numbers in (0, 1), a pure function of seed and arguments
UniformNoise = Callable[[int, int, IntArray], FloatArray]


def no_noise(stream: int, step: int, positions: IntArray) -> FloatArray:
    raise RuntimeError("this canvas was made without a noise source")


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a row's length: the ``removed`` positions from ``at`` on give way to ``added``
    ones, which are undecided unless ``token`` says what stands there.  All three kinds of edits are
    this: at the end of the region without anything removed it appends, without anything added it
    cuts, and elsewhere it inserts."""

    at: int
    removed: int
    added: int
    token: int | None = None

    def moved(self, position: int) -> int | None:
        """Where a position is afterwards, None where it was removed."""
        if position < self.at:
            return position
        return position + self.added - self.removed if position >= self.at + self.removed else None

    def spliced(self, array: Any, fill: Any) -> Any:
        """``array`` (N,) with ``fill`` at the added positions."""
        new = np.full((self.added, *array.shape[1:]), fill, array.dtype)
        return np.concatenate([array[: self.at], new, array[self.at + self.removed :]])


def moved(position: int, edits: Iterable[Edit]) -> int | None:
    """Where a position is after several edits in turn, None where it was removed."""
    at: int | None = position
    for edit in edits:
        at = None if at is None else edit.moved(at)
    return at


@dataclass(frozen=True, slots=True)
class Hole:
    """A part ``[low, high)`` of a text that is to be filled in.  It has ``least`` to ``most``
    positions, where a rule may change how many."""

    low: int
    high: int
    least: int
    most: int

    @property
    def size(self) -> int:
        return self.high - self.low

    def after(self, edit: Edit) -> Self:
        """Where it is after an edit."""
        more = edit.added - edit.removed
        low, high = (i if i <= edit.at else max(edit.at, i + more) for i in (self.low, self.high))
        return replace(self, low=low, high=high)


@dataclass(slots=True)
class Blocks:
    """The blocks that a window with several of them has opened so far, as ascending ``edges``, one
    more than blocks; empty where a window is one block.  Samplers write and caches read it."""

    edges: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(slots=True, eq=False)
class Canvas:
    """One row: prompt, undecided positions, and what was decided when.

    ``tokens`` (N,) int64 holds the mask id at undecided positions (-1 where the noise is uniform),
    or what a sampler `hold`s there; ``masked`` (N,) bool is the truth about what is undecided.
    ``start`` and ``end`` bound the region to be written; ``window`` is the part of it in which this
    step may commit.  ``commit_step`` (N,) int64 is the step that decided a position, -1 for given
    text and for undecided positions; ``logprob`` (N,) float32 is the log-probability it had then.
    ``length`` counts the live positions: what lies beyond was cut off by a stop.  Between ``end``
    and ``length`` stands given text, or padding.
    """

    tokens: IntArray
    masked: BoolArray
    prompt_length: int
    start: int
    end: int
    mask_id: int
    pad_id: int
    row: int = 0
    noise: UniformNoise = no_noise

    window: tuple[int, int] = (0, 0)
    block: int = -1  # windows opened so far, minus one
    block_step: int = 0  # steps taken in the current window
    step: int = 0  # steps taken, including those a schedule left empty
    nfe: int = 0  # forwards this row took part in
    computed: int = 0  # token positions fed to the model
    forced: int = 0  # commits that only the progress guarantee made
    finish_reason: str | None = None
    stop_position: int | None = None  # where the answer ends, if a stop id ended it
    length: int = 0
    origin: int | None = None  # where blocks are counted from; None: the region's start
    text_floor: int = 0  # the text does not end before this position: something is given there
    revising: bool = False  # whether decisions of the window may still change
    cap: int = 0  # most positions of the region, where a rule finds its length
    probes: int = 0  # forwards, among `nfe`, that only looked for the length
    holes: tuple[Hole, ...] = ()  # of a text with holes, in turn
    region: tuple[int, int] = field(init=False)  # start and end before anything was cut off
    given: BoolArray = field(init=False)
    commit_step: IntArray = field(init=False)
    logprob: FloatArray = field(init=False)
    states: dict[type, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.length = len(self.tokens)
        self.region = self.start, self.end
        self.given = ~self.masked
        self.commit_step = np.full(self.length, -1)
        self.logprob = np.zeros(self.length, np.float32)
        self.window = (self.start, self.start)
        fixed = np.flatnonzero(self.given[self.prompt_length :])
        self.text_floor = self.prompt_length + (int(fixed[-1]) + 1 if fixed.size else 0)

    @classmethod
    def for_prompt(cls, prompt: IntArray, new_tokens: int, *, mask_id: int, pad_id: int,
                   row: int = 0, noise: UniformNoise = no_noise) -> Self:  # fmt: skip
        """A prompt followed by ``new_tokens`` undecided positions."""
        total = len(prompt) + new_tokens
        tokens = np.full(total, mask_id)
        tokens[: len(prompt)] = prompt
        masked = np.arange(total) >= len(prompt)
        return cls(tokens, masked, len(prompt), len(prompt), total, mask_id, pad_id, row, noise)

    @classmethod
    def for_infill(
        cls, tokens: IntArray, masked: BoolArray, prompt_length: int, *, mask_id: int,
        pad_id: int, row: int = 0, noise: UniformNoise = no_noise, sizes: Sequence[int] = (),
        bounds: Sequence[tuple[int, int]] = (),
    ) -> Self:  # fmt: skip
        """A prompt and a text with holes of those ``sizes``, which stay within ``bounds``: the
        region reaches from the first to the last."""
        where = [*np.flatnonzero(masked).tolist(), len(tokens)]
        tokens = np.where(masked, mask_id, tokens)
        canvas = cls(tokens, masked.copy(), prompt_length, where[0], where[-2] + 1, mask_id,
                     pad_id, row, noise)  # fmt: skip
        firsts = [where[first] for first in accumulate(sizes, initial=0)]
        canvas.holes = tuple(
            Hole(low, low + n, *bound)
            for low, n, bound in zip(firsts, sizes, bounds or [(n, n) for n in sizes], strict=False)
        )
        return canvas

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def masks(self) -> IntArray:
        """Undecided positions of the window, ascending."""
        low, high = self.window
        return self.masked[low:high].nonzero()[0] + low

    def frontier(self) -> int:
        """The first undecided position of the region, or its end."""
        open_ = self.masked[self.start : self.end]
        return self.start + int(open_.argmax()) if open_.any() else self.end

    def state(self, kind: type[S]) -> S:
        """What a part remembers of this row: an object of its own class ``kind``, made without
        arguments when it is first asked for.  Forks get a copy."""
        if kind not in self.states:
            self.states[kind] = kind()
        state: S = self.states[kind]
        return state

    def uniform(self, purpose: int, positions: IntArray) -> FloatArray:
        """Uniform noise in (0, 1) for ``positions``, keyed by row, purpose, step and position."""
        return self.noise(self.row * PURPOSES + purpose, self.step, positions)

    def fed_ids(self, positions: IntArray, size: int) -> IntArray:
        """(n,) ids that ``positions`` are fed as in this step where the noise is uniform: what is
        written or held there, else a random id below ``size``, drawn anew in every step."""
        ids = self.tokens[positions]
        blank = ids < 0
        if blank.any():
            drawn = self.noise(FED + self.row, self.step, positions[blank]).astype(np.float64)
            ids[blank] = (drawn * size).astype(np.int64)
        return ids

    def block_at(self, position: int, size: int) -> tuple[int, int]:
        """The block of ``size`` positions, counted from `origin`, that holds ``position``."""
        origin = self.start if self.origin is None else self.origin
        low = origin + max(0, position - origin) // size * size
        return low, low + size

    def hold(self, positions: IntArray, tokens: IntArray) -> None:
        """Let undecided ``positions`` be fed as these tokens; -1: as noise again."""
        self.tokens[positions] = np.where(tokens < 0, self.mask_id, tokens)

    def open_window(self, low: int, high: int) -> None:
        """Make ``[low, high)`` the window; a new window starts a new block."""
        self.window = (low, high)
        self.block += 1
        self.block_step = 0

    def commit(self, positions: IntArray, tokens: IntArray, logprobs: FloatArray) -> None:
        """Decide ``positions``, or replace what was decided there."""
        self.tokens[positions] = tokens
        self.masked[positions] = False
        self.commit_step[positions] = self.step
        self.logprob[positions] = logprobs

    def give(self, position: int, tokens: IntArray) -> None:
        """Fix text from ``position`` on: it counts as given and cannot be taken back."""
        here = slice(position, position + len(tokens))
        self.tokens[here] = tokens
        self.masked[here] = False
        self.given[here] = True
        self.text_floor = max(self.text_floor, here.stop)

    def draft(self, tokens: IntArray) -> None:
        """Begin the region with a draft, -1 or a mask where it is open: the rest counts as decided,
        and not as given, so that a reviser may change it and the text may end within it."""
        here = slice(self.start, self.start + len(tokens))
        self.masked[here] = open_ = (tokens < 0) | (tokens == self.mask_id)
        self.tokens[here] = np.where(open_, self.mask_id, tokens)

    def remask(self, positions: IntArray) -> None:
        """Take decisions back; given text cannot be taken back."""
        positions = positions[~self.given[positions]]
        self.tokens[positions] = self.mask_id
        self.masked[positions] = True
        self.commit_step[positions] = -1

    def cut(self, position: int, keep: bool = False) -> None:
        """End the region after ``position``; whatever stands to its right becomes padding, which
        leaves the row unless told to ``keep`` it: then it is fed and attended to like any token."""
        if self.text_floor > self.end:
            raise ValueError("text follows the region: it cannot be cut")
        self.tokens[position + 1 :] = self.pad_id
        self.masked[position + 1 :] = False
        self.end = position + 1
        if not keep:
            self.length = self.end
        low, high = self.window
        self.window = min(low, self.end), min(high, self.end)

    def edit(self, edit: Edit) -> None:
        """Change the length of the region.  Given text is never removed; what part of a sampler
        remembers of positions moves along, where its state has a method ``moved(edit)``."""
        at, past = edit.at, edit.at + edit.removed
        if not self.start <= at <= past <= self.end or self.given[at:past].any():
            raise ValueError(f"{edit} does not fit the region [{self.start}, {self.end})")
        if at == self.end and self.text_floor > self.end:
            raise ValueError("text follows the region: it cannot grow at its end")
        written = edit.token is not None
        fills = {
            "tokens": edit.token if written else self.mask_id, "masked": not written,
            "given": False, "commit_step": self.step if written else -1, "logprob": 0,
        }  # fmt: skip
        for name, fill in fills.items():
            setattr(self, name, edit.spliced(getattr(self, name)[: self.length], fill))
        more = edit.added - edit.removed
        self.end, self.length = self.end + more, self.length + more
        self.region = self.region[0], self.end
        if self.text_floor > at:
            self.text_floor += more
        self.holes = tuple(hole.after(edit) for hole in self.holes)
        low, high = self.window
        self.window = min(low, self.end), min(high, self.end)
        for state in self.states.values():
            if hasattr(state, "moved"):
                state.moved(edit)

    def finish(self, reason: str) -> None:
        self.finish_reason = reason

    def become(self, other: Self) -> None:
        """Take over everything of ``other``, which must not be used any more."""
        for name in Canvas.__slots__:
            setattr(self, name, getattr(other, name))

    def fork(self) -> Self:
        """An independent copy, e.g. a branch of an exploration."""
        twin = copy.copy(self)
        for name in ("tokens", "masked", "given", "commit_step", "logprob"):
            setattr(twin, name, getattr(self, name).copy())
        twin.states = copy.deepcopy(self.states)
        return twin
