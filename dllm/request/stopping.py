"""Stop strings: a row ends where its decided text contains one."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.canvas import Canvas, IntArray
from ..core.config import GenerationConfig
from ..core.errors import ConfigError
from ..core.text import stop_at, stop_floor
from ..models import DiffusionModel


@dataclass(slots=True)
class StopSearch:
    """What the search for stop strings remembers of a row: how far it has looked."""

    frontier: int | None = None


def stop_strings(model: DiffusionModel, config: GenerationConfig) -> Callable[[Canvas], None]:
    """After a step: finish a row whose decided beginning contains a stop string, also where a stop
    id of the same step lies behind it, but not before `stop_floor`.  In the last hole of a text one
    also cuts off what is given behind it."""
    if model.tokenizer is None:
        raise ConfigError(f"{model.name} came without a tokenizer: it has no stop_strings")
    tokenizer = model.tokenizer

    def decode(tokens: IntArray) -> str:
        return str(tokenizer.decode(tokens.tolist()))

    def check(canvas: Canvas) -> None:
        if canvas.revising:
            return
        frontier = canvas.frontier()
        search = canvas.state(StopSearch)
        if frontier == search.frontier:
            return
        search.frontier = frontier
        floor = stop_floor(canvas, config)
        low = floor if canvas.holes else canvas.start
        tokens = canvas.tokens[low:frontier]
        last = _stop_in(decode, tokens, config.stop_strings, floor - low)
        if last is not None:
            canvas.text_floor = min(canvas.text_floor, floor)
            canvas.stop_position = low + last
            canvas.cut(canvas.stop_position)
            canvas.finish("stop")

    return check


def _stop_in(
    decode: Callable[[IntArray], str], tokens: IntArray, stops: Sequence[str], floor: int
) -> int | None:
    """Index of the token that completes the first stop string, beyond the first ``floor`` ones."""
    if len(tokens) <= floor:
        return None
    least = len(decode(tokens[:floor])) if floor > 0 else 0

    def stopped(index: int) -> bool:
        return stop_at(decode(tokens[: index + 1]), stops, least) is not None

    last = len(tokens) - 1
    if not stopped(last):
        return None
    return bisect_left(range(last), True, lo=max(0, floor), key=stopped)
