"""Options of ``dllm generate``."""

from dataclasses import dataclass
from pathlib import Path

from .options import DRAFTING, JSON, RAW, TRACE, Generation, option


@dataclass(frozen=True, kw_only=True)
class Answers(Generation):
    """Options of ``dllm generate``."""

    PARAMETERS = Generation.PARAMETERS | {"top_candidates"}
    verifier: str | None = option(None, "Autoregressive model whose text is written.", DRAFTING)
    drafter: list[str] | None = option(
        None,
        "With --verifier: drafters, tried in order (a model, a folder, prompt_lookup, none); "
        "repeatable; default --model.",
        DRAFTING,
    )
    search: str | None = option(None, "Draft search, e.g. cps.", DRAFTING)
    rule: str | None = option(None, "Acceptance rule, e.g. keyed.", DRAFTING)
    controller: str | None = option(None, "Draft length, e.g. 'fixed(k=8)'.", DRAFTING)
    raw: bool = RAW()
    json: bool = JSON()
    trace: Path | None = TRACE()

    @property
    def drafters(self) -> list[str]:
        """Names of drafters; none for plain decoding."""
        named = self.drafter or [self.model]
        return [] if named == ["none"] else named
