"""Options of ``dllm generate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .options import DRAFTING, Generation, Json, Prompted, Raw, TraceFile, option


@dataclass(frozen=True, kw_only=True)
class Answers(Generation, Prompted):
    """Options of ``dllm generate``."""

    PARAMETERS = Generation.PARAMETERS | {"top_candidates"}
    verifier: Annotated[
        str | None, option("Autoregressive model whose text is written.", DRAFTING)
    ] = None
    drafter: Annotated[
        list[str] | None,
        option("With --verifier: drafters, tried in order (a model, a folder, prompt_lookup, "
               "none); repeatable; default --model.", DRAFTING),
    ] = None  # fmt: skip
    search: Annotated[str | None, option("Draft search, e.g. cps.", DRAFTING)] = None
    rule: Annotated[str | None, option("Acceptance rule, e.g. keyed.", DRAFTING)] = None
    controller: Annotated[str | None, option("Draft length, e.g. 'fixed(k=8)'.", DRAFTING)] = None
    raw: Raw = False
    json: Json = False
    trace: TraceFile = None

    @property
    def drafters(self) -> list[str]:
        """Names of drafters; none for plain decoding."""
        named = self.drafter or [self.model]
        return [] if named == ["none"] else named
