"""Stop strings: a row ends where its decided text contains one."""

from bisect import bisect_left
from collections.abc import Callable
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
        frontier, search = canvas.frontier(), canvas.state(StopSearch)
        if frontier == search.frontier:
            return
        search.frontier = frontier
        floor = stop_floor(canvas, config)
        low = floor if canvas.holes else canvas.start
        tokens, first = canvas.tokens[low:frontier], max(0, floor - low)
        if len(tokens) <= first:
            return
        least = len(decode(tokens[:first])) if first else 0

        def stopped(index: int) -> bool:
            return stop_at(decode(tokens[: index + 1]), config.stop_strings, least) is not None

        last = len(tokens) - 1
        if stopped(last):  # then by the first token with which it is
            canvas.text_floor = min(canvas.text_floor, floor)
            canvas.stop_position = low + bisect_left(range(last), True, lo=first, key=stopped)
            canvas.cut(canvas.stop_position)
            canvas.finish("stop")

    return check
