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
    TopCandidates,
    TraceFile,
    option,
)


@dataclass(frozen=True, kw_only=True)
class Answers(Generation, Prompted):
    """Options of ``dllm generate``."""

    top_candidates: TopCandidates = None
    verifier: Annotated[
        str | None,
        option("--verifier", panel=DRAFTING, text="Autoregressive model whose text it will be."),
    ] = None
    drafter: Annotated[
        list[str] | None,
        option(
            "--drafter",
            panel=DRAFTING,
            text="With --verifier: what proposes tokens, a model or e.g. prompt_lookup; "
            "repeatable, the first that has something to say; default --model; 'none'.",
        ),
    ] = None
    search: Annotated[
        str | None, option("--search", panel=DRAFTING, text="How a draft is found, e.g. cps.")
    ] = None
    rule: Annotated[
        str | None, option("--rule", panel=DRAFTING, text="How drafts are accepted, e.g. keyed.")
    ] = None
    controller: Annotated[
        str | None,
        option("--controller", panel=DRAFTING, text="Length of drafts, e.g. 'fixed(k=8)'."),
    ] = None
    raw: Raw = False
    json: Json = False
    trace: TraceFile = None
    n: Annotated[
        int, option("-n", panel=DECODING, text="Answers per prompt; alike at temperature 0.", min=1)
    ] = 1
    output: Annotated[
        Path | None,
        option("--output", "-o", panel=OUTPUT, text="Write JSON lines to this file."),
    ] = None
    resume: Annotated[
        bool, option("--resume", panel=OUTPUT, text="Go on with --output: answer what it lacks.")
    ] = False

    @property
    def drafters(self) -> list[str]:
        """Names of drafters; none for plain decoding."""
        named = self.drafter or [self.model]
        return [] if named == ["none"] else named
