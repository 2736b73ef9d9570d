"""An answer that gets another block when it has filled the last one."""

from ..core.canvas import Edit, IntArray
from ..core.capabilities import CONSTRAINED
from ..core.limits import COUNT, NOT_NEGATIVE, bounds
from .base import View
from .compose import register
from .eos import stops
from .turn import Length


def ended(view: View, frontier: int) -> bool:
    """Whether what is decided left of ``frontier`` ends the text."""
    return stops(view.canvas, view.canvas.start, frontier, view.stop_ids).size > 0


def after_a_miss(view: View, block: int) -> tuple[Edit, ...]:
    """Another block, where all is decided, nothing ends the text and there may be more."""
    canvas = view.canvas
    room = canvas.start + canvas.cap - canvas.end
    if room < 1 or canvas.frontier() < canvas.end or ended(view, canvas.end):
        return ()
    return (Edit(canvas.end, 0, min(block, room)),)


@register(
    "append",
    paper="Block Diffusion: Interpolating Between Autoregressive and Diffusion Language Models",
    arxiv="2503.09573",
)
class Append(Length):
    """Append a ``block`` (the model's, else ``block_length``, else 32) when the last one opens.

    ``lookahead`` blocks of masks (1; 0 for models whose text does not see what is right of its
    block) stand behind the block that is being decided, because a model without a causal mask
    writes towards the end that it sees; windows that slide have one, too.  Nothing is appended
    behind an end of text, and a block is cut at ``max_new_tokens``, the first one, too.  On
    block-causal models, decoded in their own blocks, and on WeDLM's the answer is that of a canvas
    of the largest size, to the last bit; on others it is an approximation.
    """

    edits = "end"
    offers = frozenset({CONSTRAINED})  # there is always more room while a text has not ended
    limits = bounds(block=COUNT, lookahead=NOT_NEGATIVE)

    block: int | None = None
    lookahead: int | None = None

    def _end(self, position: int, start: int, origin: int, cap: int) -> int:
        """Where the region ends while ``position`` is the first undecided one."""
        block, ahead = self.block or 32, 1 if self.lookahead is None else self.lookahead
        return min(start + cap, origin + ((position - origin) // block + 1 + ahead) * block)

    def open(self, start: int, origin: int, cap: int) -> int:
        return self._end(start, start, origin, cap) - start

    def resize(self, view: View, committed: IntArray) -> tuple[Edit, ...]:
        canvas, first = view.canvas, view.canvas.frontier()
        origin = canvas.start if canvas.origin is None else canvas.origin
        end = self._end(first, canvas.start, origin, canvas.cap)
        if end <= canvas.end or ended(view, first):
            return ()
        return (Edit(canvas.end, 0, end - canvas.end),)
