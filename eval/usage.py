"""What an evaluation cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..likelihood.scoring import Score
from ..runtime.result import Result


@dataclass
class Usage:
    """What the answers of a `DLLM` cost, likelihoods apart from generations."""

    requests: int = 0
    tokens: int = 0
    nfe: int = 0
    computed: int = 0
    seconds: float = 0.0
    likelihoods: int = 0
    likelihood_nfe: int = 0
    largest_stderr: float = 0.0
    shortened: int = 0  # requests whose prompt or canvas was cut to fit the context

    def add(self, answer: Result) -> None:
        """Count a generation."""
        self.requests += 1
        self.tokens += len(answer.tokens)
        self.nfe += answer.nfe
        self.computed += answer.computed


@dataclass(frozen=True)
class Scored(Score):
    """The score of a request, and which document of which task it belongs to."""

    task: str = ""
    doc_id: int | None = None


def whole(parts: Sequence[Score]) -> Score:
    """The score of a text from those of its windows, whose estimates are independent."""
    return Score(
        logprob=sum(part.logprob for part in parts),
        stderr=math.hypot(*(part.stderr for part in parts)),
        tokens=sum(part.tokens for part in parts),
        nfe=sum(part.nfe for part in parts),
        computed=sum(part.computed for part in parts),
    )
