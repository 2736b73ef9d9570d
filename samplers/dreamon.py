"""DreamOn: a model that asks for another mask, or for one less, where it writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.canvas import BoolArray, Canvas, Edit, Hole, IntArray
from ..core.limits import COUNT, bounds
from .base import Ban, Part, View
from .compose import register
from .eos import Eos
from .fixed import Fixed
from .scorers import NegEntropy
from .turn import Length
from .windows import WholeRegion


@dataclass
class Expansions:
    """How many masks were added so far."""

    count: int = 0


@register(
    "dreamon", paper="DreamOn: Diffusion Language Models For Code Infilling Beyond Fixed-size "
    "Canvas", arxiv="2602.01326",
)  # fmt: skip
class DreamOn(Length):
    """A position at which the model asks for room becomes two, one where it says end is deleted.

    For models of family ``dreamon``, which have a token that asks for another mask.  The region
    begins with ``initial`` (64) positions, in a text with holes as these say: ``[[8]]`` stays at 8,
    ``[[2..32]]`` begins with 8 and keeps within its bounds.  Room is asked for at most ``budget``
    times (the most positions there may be).  With ``delete_to_right`` (True) all masks right of a
    deleted one, in the same hole, go with it.  As published it decides one position per step, of
    the lowest entropy, with ``temperature=0.2, top_p=0.9``.
    """

    edits = "holes"
    limits = bounds(initial=COUNT, budget=COUNT)

    initial: int | None = None
    budget: int | None = None
    delete_to_right: bool = True
    eos_token_id: int | None = None
    expand_token_id: int | None = None

    def companions(self, family: str) -> tuple[Part, ...]:
        return (Fixed(1), NegEntropy(), WholeRegion(), Eos("none"))

    @property
    def bans(self) -> Mapping[int, Ban | None]:  # type: ignore[override]
        if self.eos_token_id is None or self.expand_token_id is None:
            return {}
        return {self.eos_token_id: self._fixed, self.expand_token_id: self._full}

    def _room(self, canvas: Canvas) -> int:
        """How many masks may still be added, whatever the bounds of holes."""
        most = self.budget or sum(hole.most for hole in _holes(canvas))
        return most - canvas.state(Expansions).count

    def _fixed(self, canvas: Canvas, positions: IntArray) -> BoolArray:
        """(n,) bool: which positions lie in a hole that may not become smaller."""
        result = np.zeros(len(positions), np.bool_)
        for hole in _holes(canvas):
            here = (positions >= hole.low) & (positions < hole.high)
            result |= here & (hole.size <= hole.least)
        return result

    def _full(self, canvas: Canvas, positions: IntArray) -> BoolArray:
        """(n,) bool: which positions lie in a hole that may not become larger."""
        result = np.full(len(positions), self._room(canvas) <= 0)
        for hole in _holes(canvas):
            here = (positions >= hole.low) & (positions < hole.high)
            result |= here & (hole.size >= hole.most)
        return result

    def resize(self, view: View, committed: IntArray) -> tuple[Edit, ...]:
        canvas, masks = view.canvas, dict[int, int]()  # position -> masks in its place
        tokens = canvas.tokens[committed]
        ends, spaces = (
            committed[tokens == token] for token in (self.eos_token_id, self.expand_token_id)
        )
        for hole in _holes(canvas):
            gone, wide = ([i for i in at.tolist() if hole.low <= i < hole.high]
                          for at in (ends, spaces))  # fmt: skip
            if self.delete_to_right and gone:
                gone += (gone[0] + canvas.masked[gone[0] : hole.high].nonzero()[0]).tolist()
            for n, at in enumerate(gone):
                masks[at] = int(hole.size - n <= hole.least)
            size = hole.size - sum(masks[at] == 0 for at in gone)
            for at in wide:
                masks[at] = 1 + int(size < hole.most and self._room(canvas) > 0)
                canvas.state(Expansions).count += masks[at] - 1
                size += masks[at] - 1
        # From the right, so that positions on the left stay where they are.
        return tuple(Edit(at, 1, masks[at]) for at in sorted(masks, reverse=True))


def _holes(canvas: Canvas) -> Sequence[Hole]:
    """What may change its length: the holes of a text, or the answer."""
    return canvas.holes or (Hole(canvas.start, canvas.end, 0, canvas.cap),)
