"""Options of ``dllm generate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from .options import (
    DECODING,
    DRAFTING,
    OUTPUT,
    Generation,
    Json,
    Prompted,
    Raw,
    TraceFile,
    option,
)


@dataclass(frozen=True, kw_only=True)
class Answers(Generation, Prompted):
    """Options of ``dllm generate``."""

    PARAMETERS = Generation.PARAMETERS | {"top_candidates"}
    verifier: Annotated[
        str | None, option("Autoregressive model whose text it will be.", DRAFTING)
    ] = None
    drafter: Annotated[
        list[str] | None,
        option("With --verifier: what proposes tokens, a model or e.g. prompt_lookup; repeatable, "
               "the first that has something to say; default --model; 'none'.", DRAFTING),
    ] = None  # fmt: skip
    search: Annotated[str | None, option("How a draft is found, e.g. cps.", DRAFTING)] = None
    rule: Annotated[str | None, option("How drafts are accepted, e.g. keyed.", DRAFTING)] = None
    controller: Annotated[str | None, option("Length of drafts, e.g. 'fixed(k=8)'.", DRAFTING)] = (
        None
    )
    raw: Raw = False
    json: Json = False
    trace: TraceFile = None
    n: Annotated[
        int, option("Answers per prompt; alike at temperature 0.", DECODING, "-n", min=1)
    ] = 1
    output: Annotated[Path | None, option("Write JSON lines to this file.", OUTPUT, "-o")] = None
    resume: Annotated[bool, option("Go on with --output: answer what it lacks.", OUTPUT)] = False

    @property
    def drafters(self) -> list[str]:
        """Names of drafters; none for plain decoding."""
        named = self.drafter or [self.model]
        return [] if named == ["none"] else named
