"""A cheap left-to-right language model that helps a search put marginals in order.

It scores the next token given the committed text and the path so far, in natural logarithms.  It
can only change which draft is proposed, never the output.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.errors import ConfigError


@dataclass
class NGram:
    """Counts of token ids up to order ``n``, interpolated with lower orders.

    p(t | c) = (count(c t) + kappa p(t | shorter c)) / (count(c) + kappa), down to the uniform
    distribution over ``vocab_size`` ids.  Counts come from the prompts and the verifier's own
    output of this and earlier sequences: the text that drafts have to agree with.
    On token ids there are no word boundaries to get wrong.
    """

    n: int = 3
    kappa: float = 1.0
    vocab_size: int = 50_000

    def __post_init__(self) -> None:
        if self.n < 1 or self.kappa <= 0:
            raise ConfigError("ngram takes n >= 1 and kappa > 0")
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}
        self._totals: dict[tuple[int, ...], int] = {}

    def learn(self, tokens: Sequence[int], fresh: int) -> None:
        """The last ``fresh`` of ``tokens`` are new text of the verifier (or of the prompt)."""
        for end in range(len(tokens) - fresh, len(tokens)):
            token = tokens[end]
            for n in range(min(self.n, end + 1)):
                context = tuple(tokens[end - n : end])
                seen = self._counts.setdefault(context, {})
                seen[token] = seen.get(token, 0) + 1
                self._totals[context] = self._totals.get(context, 0) + 1

    def start(self, prefix: Sequence[int]) -> tuple[int, ...]:
        """The state after the committed tokens."""
        return tuple(prefix[max(0, len(prefix) - self.n + 1) :])

    def logprobs(self, state: tuple[int, ...], tokens: Sequence[int]) -> list[float]:
        """Conditional log-probability of each of ``tokens`` as the next one."""
        levels = []
        for n in range(len(state) + 1):
            context = state[len(state) - n :]
            seen = self._counts.get(context)
            if seen is None:
                break
            levels.append((seen, self._totals[context]))
        result = []
        for token in tokens:
            p = 1.0 / self.vocab_size
            for seen, total in levels:
                p = (seen.get(token, 0) + self.kappa * p) / (total + self.kappa)
            result.append(math.log(p))
        return result

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        """The state after one more token."""
        return self.start((*state, token))
