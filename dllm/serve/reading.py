"""Bodies, from bytes to what is asked for.

Whoever parses a large body holds the interpreter, and with it the answers to everybody, also in a
thread.  So large ones are read in a process, which gives back no more than the model can take.
"""

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request

from ..core.child import Child
from .encoding import FairQueue, check
from .http import outcome, read_body, unless_gone
from .problems import Problem

T = TypeVar("T")
LARGE = 2**16  # bytes from which on a body is read in the process: below, that takes milliseconds


class Reader:
    """Reads bodies of at most ``most`` bytes for a model that takes ``limit`` tokens."""

    def __init__(self, most: int, limit: int) -> None:
        self.most, self.limit = most, limit
        self._line, self._child = FairQueue("dllm-read"), Child()

    async def read(self, request: Request, read: Callable[[Any], T]) -> T:
        """What ``read``, which has a name in a module, makes of the JSON; `Problem` where it is too
        large, too slow, or something else."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Problem(415, "send JSON, with the header Content-Type: application/json")
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise Problem(415, "bodies are read as they are: send it without Content-Encoding")
        body = await read_body(request, self.most)
        if len(body) < LARGE:
            return from_json(read, body, self.limit)
        client = "\0".join(request.state.client)
        try:
            return await unless_gone(request, outcome(self._line.submit(
                client, lambda: self._child.call(from_json, read, body, self.limit)
            )))  # fmt: skip
        except ChildProcessError:
            raise Problem(413, "the body takes too much memory", code="body_too_large") from None

    def close(self) -> None:
        self._child.close()
        self._line.close()


def from_json(read: Callable[[Any], T], body: bytes, limit: int) -> T:
    """What ``read`` makes of ``body``, whose texts could fit ``limit`` tokens."""
    try:
        data = parsed(body)
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the body is not JSON: {error}", code="invalid_json") from None
    result = read(data)
    check(getattr(result, "texts", ()), limit)
    return result


def parsed(text: bytes | str) -> Any:
    """What is said in JSON with finite numbers; `ValueError` or `RecursionError` for other text."""
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is larger than any number here")
    return value
