"""What a server is told when it starts."""

import re
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from ..core.config import Count, Number, Serving
from ..core.declared import Numeric, about
from ..core.errors import ConfigError, short

SAMPLER = "threshold"
ORIGIN = r"\*|null|[a-z][a-z0-9+.-]*://[^/?#]+"  # as browsers send it
Seconds = Annotated[float, Field(gt=0), Numeric]


class Settings(Serving):
    """How to serve a model."""

    KIND = "setting of a server"

    name: Annotated[str | None, about("What clients call the model.")] = None
    caches: Annotated[tuple[str, ...], about(
        "Caches that requests choose from; the first is the default.  Each has sequences and a "
        "queue of its own, and all share the model.", flag="cache")] = ("none",)  # fmt: skip
    drafters: Annotated[tuple[str, ...], about(
        "Drafters of an autoregressive model, tried in order.", flag="drafter")] = ()  # fmt: skip
    max_waiting: Annotated[Number, about("Requests in the queue; more are rejected with 429.")] = 64
    deadline: Annotated[Seconds, about("Seconds for a request, queue included.")] = 600.0
    drain: Annotated[Seconds, about("Seconds to finish running requests at shutdown.")] = 30.0
    max_body: Annotated[Count, about("Maximum size of a request in bytes.")] = 8 * 2**20
    max_prompt_tokens: Annotated[Count | None, about("Maximum tokens of a prompt.")] = None
    api_key: Annotated[str | None, about(
        "API key that clients must send; several are separated by commas.")] = None  # fmt: skip
    cors: Annotated[tuple[str, ...], about(
        "Origin whose web pages may send requests, or * for all.  Those of this machine may.",
    )] = ()  # fmt: skip
    page: Annotated[bool, about("Serve the web UI at '/'.")] = True
    tool_parser: Annotated[str | None, about(
        "Syntax of the model's tool calls: hermes or llama (default: by its chat template).",
    )] = None  # fmt: skip
    write_patience: Annotated[Seconds, about("Seconds that a reader may stop reading.")] = 30.0

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
        if self.api_key is not None and not self.api_key.strip(" ,"):
            raise ConfigError("the API key is empty: give one, or none at all")
        if wrong := [one for one in self.cors if not re.fullmatch(ORIGIN, one)]:
            raise ConfigError(f"{short(wrong[0])} is no origin: write it as https://example.org, "
                              "without a path, or * for all")  # fmt: skip
        return self
