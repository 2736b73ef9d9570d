"""What a speculative generation returns: a `Result` with acceptance statistics."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..core.canvas import FloatArray
from ..runtime.result import Result
from .base import RoundStats


@dataclass(frozen=True, eq=False)
class SpeculativeResult(Result):
    """A verified text.  ``nfe`` counts the verifier's forwards (rounds, the first of which reads
    the prompt), ``computed`` the positions it was fed; ``order`` is the round that emitted each
    token, ``logprobs`` are the verifier's, before temperature and filters.  ``rounds`` has one
    entry per forward.  ``lossy``: the rule keeps tokens that the verifier would not have written;
    the text is not the verifier's then."""

    rounds: list[RoundStats] = field(default_factory=list, repr=False)
    drafter: str = "none"
    rule: str = "greedy"
    lossy: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "rounds": [asdict(stats) for stats in self.rounds]}

    @property
    def drafted(self) -> int:
        """Tokens sent to the verifier, nodes of trees included."""
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        """Drafted tokens that were kept; the extra token of each round is not among them."""
        return sum(r.accepted for r in self.rounds)

    @property
    def deviations(self) -> int:
        """Tokens that a lossy rule kept although the verifier would have written others."""
        return sum(r.deviations for r in self.rounds)

    @property
    def accepted_per_round(self) -> float:
        """Mean accepted tokens per round, rounds without a draft included."""
        return self.accepted / max(1, len(self.rounds))

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; says nothing without the draft length."""
        return self.accepted / max(1, self.drafted)

    @property
    def survival(self) -> FloatArray:
        """Share of all rounds that accepted at least i tokens, i = 1, 2, ..."""
        accepted = np.array([r.accepted for r in self.rounds])
        deepest = int(max((r.depth for r in self.rounds), default=0))
        return np.array([(accepted >= i).mean() for i in range(1, deepest + 1)], np.float32)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the time spent drafting (without search), searching, verifying, elsewhere."""
        seconds = {
            "draft": sum(r.draft_seconds - r.search_seconds for r in self.rounds),
            "search": sum(r.search_seconds for r in self.rounds),
            "verify": sum(r.verify_seconds for r in self.rounds),
            "other": sum(r.other_seconds for r in self.rounds),
        }
        total = sum(seconds.values()) or 1.0
        return {name: value / total for name, value in seconds.items()}

    def footer(self) -> str:
        lossy = f" · LOSSY rule {self.rule}: {self.deviations} tokens are not the verifier's"
        return (
            f"{len(self.tokens)} tokens · {self.nfe} verifier forwards · "
            f"{self.tokens_per_forward:.2f} tokens per forward · "
            f"{self.accepted} of {self.drafted} drafted tokens accepted · {self.seconds:.2f} s · "
            f"{self.finish_reason}{lossy if self.lossy else ''}"
        )
