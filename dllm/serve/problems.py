"""What goes wrong, in the form that OpenAI's clients expect."""

import asyncio
import reprlib
from typing import Any

from ..core import errors
from .words import in_http

LONGEST = 2000  # characters of a message, names that would have been right included
LONGEST_QUOTE = 200  # characters of a value
CLOSED = 499  # what nginx logs for a client that left; nobody receives it

# The type of an error by its status; of others it is the request that is wrong, or the server.
TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 429: "rate_limit_error",
    503: "service_unavailable_error", 504: "timeout_error",
}  # fmt: skip


def shortened(value: Any) -> str:
    """A value in an error message: nobody is sent back megabytes."""
    text = reprlib.repr(value)
    return text if len(text) <= LONGEST_QUOTE else text[:LONGEST_QUOTE] + "..."


class Problem(Exception):
    """An answer that is an error.

    ``param`` names the field that is to blame; ``code`` is for programs.  ``retry_after``: seconds
    after which another try makes sense; None where the same request would fail again.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        retry_after: float | None = None,
    ) -> None:  # fmt: skip
        message = message if len(message) <= LONGEST else message[:LONGEST] + "..."
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        """For `pickle`, which knows the arguments of `Exception` alone."""
        return Problem, (self.status, self.message, self.param, self.code, self.retry_after)

    def body(self) -> dict[str, Any]:
        """OpenAI's envelope."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": TYPES.get(self.status, kind)}
        return {"error": {**error, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """``Retry-After``, or for OpenAI's clients that a retry is useless."""
        if self.retry_after is not None:
            return {"Retry-After": str(max(1, round(self.retry_after)))}
        return {"x-should-retry": "false"}


def unsupported(field: str | None, message: str) -> Problem:
    """The problem of a request for what this server does not do."""
    return Problem(400, message, field, "unsupported_value")


def invalid(field: str | None, message: str) -> Problem:
    """The problem of a value that a field cannot have."""
    return Problem(400, message, field, "invalid_value")


def stopping() -> Problem:
    """The problem of a request that came too late."""
    return Problem(503, "the server is stopping", code="stopping", retry_after=1)


def problem_of(error: BaseException, retry_after: float = 1.0, context: int = 0) -> Problem:
    """``error`` as an answer.  Only what this library raises on purpose is shown to clients;
    ``context``: tokens of the model's."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, asyncio.CancelledError):
        return Problem(CLOSED, "the client has left")
    if isinstance(error, RecursionError):
        return Problem(400, "the body is nested too deeply", code="invalid_body")
    text = in_http(errors.message_of(error))
    if isinstance(error, errors.QueueFullError):
        return Problem(429, text, code="queue_full", retry_after=retry_after)
    if isinstance(error, errors.DeadlineError):
        return Problem(504, text, code="deadline_exceeded")
    if isinstance(error, errors.CancelledError):
        return Problem(503, "the request was cancelled: the server is stopping", code="stopping",
                       retry_after=retry_after)  # fmt: skip
    if isinstance(error, errors.OutOfMemoryError):
        return Problem(503, text, code="out_of_memory", retry_after=retry_after)
    if isinstance(error, errors.PromptError | errors.ConfigError) and "the context" in text:
        # Clients look for these words, each for others.
        text = (
            f"The prompt is too long: this model's maximum context length is {context} tokens, "
            f"the answer's max_tokens included ({text})"
        )
        return Problem(400, text, code="context_length_exceeded")
    if isinstance(error, errors.DllmError):
        return Problem(400 if isinstance(error, ValueError) else 500, text)
    return Problem(500, "the server failed on this request; its log says more")
