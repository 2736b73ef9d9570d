"""What a server is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .metrics import NAMES

SAMPLER = "threshold"
WRITE_PATIENCE = 30.0  # seconds that a reader may keep a full connection waiting


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to serve a model.

    ``name``: what clients call the model (default: the model's own name). ``sampler`` (default
    "threshold"), ``length``: of requests that name none; where the length is found, ``max_tokens``
    is the most that an answer may get, and it holds memory for what it has. ``caches``: those that
    requests may ask for, the first by default; each has rows and a queue of its own, and all share
    the model. ``drafters``: of an autoregressive model, whose texts they help to write; the first
    that has a draft.
    ``max_rows``: requests that are written at a time; ``max_waiting``: those that may wait,
    more get 429; ``max_positions``: room for keys and values; ``max_batch_tokens``: most
    positions of a forward;
    ``keep_prefixes``: tokens of complete texts that are kept for those that begin like them.
    ``deadline``: seconds after which a request is given up, also in the queue. ``drain``:
    seconds that running requests get after SIGTERM. ``max_body``: bytes of a request;
    ``max_prompt_tokens``: of a prompt, None for what the context leaves. ``api_key``: what
    ``/v1`` asks for; None for nothing. ``metrics_names``: "dllm", or "vllm" for vLLM's names.
    ``page``: whether there is a page at ``/``.  ``tool_parser``: how the model writes calls of
    tools (`dllm.serve.tools`); None: as its chat template says.
    """

    name: str | None = None
    sampler: str | None = None
    length: str | None = None
    caches: tuple[str, ...] = ("none",)
    drafters: tuple[str, ...] = ()
    max_rows: int = 16
    max_waiting: int = 64
    max_positions: int | None = None
    max_batch_tokens: int | None = None
    keep_prefixes: int | None = None
    cuda_graphs: bool = False
    compile: bool = False
    deadline: float = 600.0
    drain: float = 30.0
    max_body: int = 8 * 2**20
    max_prompt_tokens: int | None = None
    api_key: str | None = None
    metrics_names: str = "dllm"
    page: bool = True
    tool_parser: str | None = None
    write_patience: float = WRITE_PATIENCE

    def session(self, cache: str) -> dict[str, Any]:
        """Arguments of the `dllm.Session` for ``cache``."""
        names = ("length", "max_rows", "max_waiting",
                 "max_positions", "max_batch_tokens", "keep_prefixes",
                 "cuda_graphs", "compile")  # fmt: skip
        given = {name: getattr(self, name) for name in names}
        return {"cache": cache} | given | {"sampler": self.sampler or SAMPLER}

    def __post_init__(self) -> None:
        if not self.caches:
            raise ConfigError("a server needs a cache: 'none' is one")
        if len(set(self.caches)) < len(self.caches):
            raise ConfigError(f"caches {', '.join(self.caches)}: one is named twice")
        if self.metrics_names not in NAMES:
            raise ConfigError(f"metrics_names is {' or '.join(NAMES)}, not {self.metrics_names!r}")
        for name in ("deadline", "drain", "write_patience"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0 seconds, not {getattr(self, name)}")
        for name in ("max_rows", "max_body"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting must be at least 0, not {self.max_waiting}")
