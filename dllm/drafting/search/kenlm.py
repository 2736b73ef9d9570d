"""A KenLM model as a proxy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError, missing
from .proxies import Proxy, register


@register("kenlm")
@dataclass
class KenLM(Proxy):
    """A KenLM model over token ids written as words ("17 4 256"), read from ``path``.

    The package reports base-10 logarithms; they are converted.  Needs the extra ``kenlm``,
    which compiles it.  ``path``: an ARPA file or a binary of KenLM's own; tokens that it does not
    know have the probability of ``<unk>``.
    """

    path: str = ""

    def __post_init__(self) -> None:
        try:
            import kenlm
        except ImportError:
            raise missing(
                "the package kenlm, which proxy='kenlm' needs,", "kenlm",
                " (it takes a C++ compiler), or use proxy='ngram'",
            ) from None  # fmt: skip
        try:
            self._kenlm, self._model = kenlm, kenlm.Model(self.path)
        except OSError as error:
            raise ConfigError(f"no KenLM model at {self.path!r}: {error}") from error

    def start(self, prefix: Sequence[int]) -> Any:
        state = self._kenlm.State()
        self._model.NullContextWrite(state)
        for token in prefix[max(0, len(prefix) - self._model.order + 1) :]:
            state = self.advance(state, int(token))
        return state

    def logprobs(self, state: Any, tokens: Sequence[int]) -> list[float]:
        out, ln10 = self._kenlm.State(), math.log(10)
        return [self._model.BaseScore(state, str(token), out) * ln10 for token in tokens]

    def advance(self, state: Any, token: int) -> Any:
        out = self._kenlm.State()
        self._model.BaseScore(state, str(token), out)
        return out
