"""What a server is told when it starts."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from ..core.config import Count, Number, Serving
from ..core.declared import Numeric, about
from ..core.errors import ConfigError

SAMPLER = "threshold"
WRITE_PATIENCE = 30.0  # seconds that a reader may keep a full connection waiting
Seconds = Annotated[float, Field(gt=0), Numeric]


class Settings(Serving):
    """How to serve a model."""

    KIND = "setting of a server"

    name: Annotated[str | None, about("What clients call the model.")] = None
    caches: Annotated[tuple[str, ...], about(
        "Requests choose, default the first.  Each has rows and a queue of its own, and all share "
        "the model.", flag="cache")] = ("none",)  # fmt: skip
    drafters: Annotated[
        tuple[str, ...],
        about("Of an autoregressive model: what proposes its tokens.", flag="drafter"),
    ] = ()
    max_waiting: Annotated[Number, about("Requests in the queue; more get 429.")] = 64
    deadline: Annotated[Seconds, about("Seconds for a request, also in the queue.")] = 600.0
    drain: Annotated[Seconds, about("Seconds for what runs at SIGTERM.")] = 30.0
    max_body: Annotated[Count, about("Bytes of a request.")] = 8 * 2**20
    max_prompt_tokens: Annotated[Count | None, about("Of a prompt.")] = None
    api_key: Annotated[
        str | None, about("What clients must know; several are separated by commas.")
    ] = None
    cors: Annotated[tuple[str, ...], about(
        "Origin whose web pages may ask, or * for all.  Those of this machine may.",
    )] = ()  # fmt: skip
    page: Annotated[bool, about("The page at '/'.")] = True
    tool_parser: Annotated[str | None, about(
        "How the model writes calls of tools: hermes or llama, default as its chat template says.",
    )] = None  # fmt: skip
    write_patience: Annotated[
        Seconds, about("Seconds that a reader may keep a full connection.")
    ] = WRITE_PATIENCE

    def session(self, cache: str) -> dict[str, Any]:
        """Arguments of the `dllm.Session` for ``cache``."""
        given = {name: getattr(self, name) for name in Serving.fields()}
        return {"cache": cache} | given | {"sampler": self.sampler or SAMPLER}

    @model_validator(mode="after")
    def _together(self) -> Self:
        if not self.caches:
            raise ConfigError("a server needs a cache: 'none' is one")
        if len(set(self.caches)) < len(self.caches):
            raise ConfigError(f"caches {', '.join(self.caches)}: one is named twice")
        return self
