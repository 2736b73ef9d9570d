"""What a recorded case becomes: the arguments of one call of this library."""

from typing import Any, NamedTuple


class Call(NamedTuple):
    """Arguments of `dllm.generate`."""

    sampler: Any
    cache: Any
    arguments: dict[str, Any]
