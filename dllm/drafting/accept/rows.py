"""The verifier's distributions after a forward, as accept rules see them.

A row is the distribution of the token after one node of the draft (row 0: after the last committed
token). Everything the user asked for is applied before any accept test: biases, penalties and
custom processors with the history that the row would have, then temperature and filters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from ...core.canvas import IntArray
from ...core.errors import ConfigError, NumericError, short
from ...kernels.noise import bits, row_gumbel, row_gumbel_at
from ...kernels.statistics.filters import PLAIN, Filters, dropped
from ..base import Array, Draft

EMIT, ACCEPT, RESIDUAL, DRAFT = 0, 1, 2, 3  # purposes of noise; EMIT is the engine's PROPOSAL
PURPOSES = 4
BROKEN = (
    "the verifier leaves no token with a finite probability: its weights hold NaN or infinite "
    "values, they overflow in this dtype (float32 may help), or a logits_processor bans every token"
)

# transformers' LogitsProcessor: (ids (1, L), scores (1, V)) -> scores (1, V)
LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class KeyedNoise:
    """Random numbers of one sequence, keyed by seed and stream.

    Emission noise depends on the position only, so that it does not matter in which round a token
    is emitted; the coins of accept tests and residual draws depend on the round as well, because a
    position may be judged in several.
    """

    seed: int
    row: int = 0

    @property
    def emission(self) -> tuple[int, int]:
        """(seed, stream) of the emission noise."""
        return self.seed, self.row * PURPOSES + EMIT

    @property
    def drafting(self) -> tuple[int, int]:
        """(seed, stream) of the drafter's own randomness."""
        return self.seed, self.row * PURPOSES + DRAFT

    def uniform(self, purpose: int, position: int, round_: int, index: int = 0) -> float:
        """A number in (0, 1) with 52 random bits."""
        stream = self.row * PURPOSES + purpose
        low, high = bits(self.seed, stream, position, round_, np.array([2 * index, 2 * index + 1]))
        return ((int(high) << 20 | int(low) >> 12) + 0.5) * 2.0**-52


@dataclass(frozen=True)
class Sampling:
    """How the verifier's logits become the distribution to sample from; transformers' names.

    Top-p is measured on the whole distribution, not on what top-k leaves.  ``bias`` has (id,
    number) pairs, added to the logits.
    ``early_bans`` are ids that may not be emitted before position ``early_end``.
    """

    filters: Filters = PLAIN
    bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    processors: tuple[LogitsProcessor, ...] = ()
    early_bans: tuple[int, ...] = ()
    early_end: int = 0

    @property
    def needs_history(self) -> bool:
        return self.repetition_penalty != 1.0 or bool(self.processors)

    def distribution(
        self, logits: torch.Tensor, histories: Sequence[IntArray], positions: IntArray
    ) -> torch.Tensor:
        """Log-distributions (R, V) float32 of raw ``logits`` (R, V); at temperature 0 the processed
        logits themselves.  ``histories`` are the tokens before each row, ``positions`` (R,) where
        its token would stand."""
        x = logits.float()
        early = np.flatnonzero(positions < self.early_end)
        if self.early_bans and early.size:
            x = x.clone() if x is logits else x
            for row in early.tolist():
                x[row, list(self.early_bans)] = -torch.inf
        if self.bias:
            ids, numbers = zip(*self.bias, strict=True)
            x = x.index_add(1, x.new_tensor(ids).long(), x.new_tensor(numbers).expand(len(x), -1))
        if self.needs_history:
            rows = x.clone()[:, None]  # processors may write to what they get
            x = torch.cat([self._with_history(*one) for one in zip(rows, histories, strict=True)])
        temperature = self.filters.temperature
        if temperature == 0:
            return x
        if self.filters.cut:
            x = x.masked_fill(dropped(x, self.filters), -torch.inf)
        return (x / temperature).log_softmax(-1)

    def _with_history(self, row: torch.Tensor, history: IntArray) -> torch.Tensor:
        ids = torch.from_numpy(history).to(row.device)[None]
        if self.repetition_penalty != 1.0:
            seen = row.gather(1, ids)
            penalty = self.repetition_penalty
            row = row.scatter(1, ids, torch.where(seen < 0, seen * penalty, seen / penalty))
        for processor in self.processors:
            found = processor(ids, row)
            if not isinstance(found, torch.Tensor) or found.shape != row.shape:
                raise ConfigError(
                    f"a logits_processor returns scores of the shape it gets, {tuple(row.shape)}, "
                    f"not {short(getattr(found, 'shape', found))}"
                )
            row = found.float()
        return row


@dataclass(eq=False)
class Rows:
    """Distributions of a forward.  Row ``node + 1`` follows the draft's ``node``, row 0 the text.

    ``logits`` (n + 1, V) are raw; ``prefix`` (L,) int64 is committed; ``round`` counts forwards.
    """

    logits: torch.Tensor
    draft: Draft
    prefix: IntArray
    sampling: Sampling
    coins: KeyedNoise
    round: int
    _known: dict[int, torch.Tensor] = field(default_factory=dict, init=False)

    @cached_property
    def positions(self) -> IntArray:
        """Where the token of each row stands (n + 1,)."""
        nodes = range(-1, len(self.draft))
        return len(self.prefix) + np.array([self.draft.depth(node) + 1 for node in nodes])

    @cached_property
    def log_distribution(self) -> torch.Tensor:
        """See `Sampling.distribution`."""
        histories: list[IntArray] = []
        if self.sampling.needs_history:
            histories = [self._history(node) for node in range(-1, len(self.draft))]
        return self.sampling.distribution(self.logits, histories, self.positions)

    def _history(self, node: int) -> IntArray:
        return np.concatenate([self.prefix, self.draft.tokens[self.draft.path(node)]])

    def _row(self, node: int) -> torch.Tensor:
        """The row of `log_distribution` after ``node``.  On a CPU, where filters take as long as a
        small forward, no row is worked out that nobody asks for: most drafts end early."""
        if self.logits.device.type != "cpu":
            return self.log_distribution[node + 1]
        if node not in self._known:
            at = slice(node + 1, node + 2)
            history = [self._history(node)] if self.sampling.needs_history else []
            found = self.sampling.distribution(self.logits[at], history, self.positions[at])
            self._known[node] = found[0]
        return self._known[node]

    def greedy(self, node: int) -> int:
        """The most probable token after ``node``; the lowest id of equals; -1 where none may
        follow or the numbers are broken, which is an error once it is to be emitted."""
        if self.logits.device.type != "cpu":
            return self._best[node + 1]
        row = self._row(node).numpy()
        best = int(row.argmax())  # ten times as fast as torch's
        return best if np.isfinite(row[best]) else -1

    @cached_property
    def _best(self) -> list[int]:
        best = self.log_distribution.argmax(-1)
        alive = self.log_distribution.gather(1, best[:, None])[:, 0].isfinite()
        return best.where(alive, -1).tolist()

    def keyed(self, node: int) -> int:
        """The token that plain sampling with this seed draws after ``node``."""
        if self.sampling.filters.temperature == 0:
            return self.greedy(node)
        return self.coupled(self._row(node), node)

    def coupled(self, row: torch.Tensor, node: int) -> int:
        """What the noise of plain sampling draws after ``node`` of log-probabilities (V,); -1 as
        in `greedy`."""
        if self.sampling.filters.temperature == 0:
            return int(row.argmax())
        seed, stream = self.coins.emission
        key = torch.tensor([[seed, stream, int(self.positions[node + 1]), 0]], device=row.device)
        alive = row.isfinite().nonzero()[:, 0]
        if not len(alive):
            return -1
        if 4 * len(alive) < len(row):  # filters leave few tokens that could need noise
            return int(alive[(row[alive] + row_gumbel_at(key, alive[None])[0]).argmax()])
        return int((row + row_gumbel(key, 0, len(row))[0]).argmax())

    def distribution(self, node: int) -> Array:
        """Probabilities (V,) float64 of the token after ``node``."""
        if self.sampling.filters.temperature == 0:
            distribution: Array = np.zeros(self.logits.shape[1])
            distribution[self.greedy(node)] = float(self.greedy(node) >= 0)
        else:
            distribution = self._row(node).double().exp().cpu().numpy()
            distribution /= distribution.sum()
        return distribution

    def coin(self, node: int) -> float:
        """A fresh uniform number for the accept test of ``node`` (of the leaf itself in trees)."""
        position = len(self.prefix) + self.draft.depth(node)
        return self.coins.uniform(ACCEPT, position, self.round, node + 1)

    def draw(self, distribution: Array, node: int) -> int:
        """A token drawn from ``distribution`` (V,), which need not be normalised, for ``node``."""
        position = int(self.positions[node + 1])
        total = distribution.cumsum()
        if not total[-1] > 0:
            raise NumericError(BROKEN)
        u = self.coins.uniform(RESIDUAL, position, self.round) * total[-1]
        result = int(np.searchsorted(total, u, side="right"))
        return min(result, int(np.flatnonzero(distribution)[-1]))

    def logprobs(self, nodes: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of ``tokens`` after ``nodes`` under the verifier's raw logits."""
        at = [node + 1 for node in nodes]
        several = at != list(range(len(at)))  # in a chain they are the first ones
        rows = self.logits[at] if several else self.logits[: len(at)]
        rows = rows.log_softmax(-1, dtype=torch.float32)
        result: list[float] = rows[range(len(at)), list(tokens)].tolist()  # in one copy
        if min(tokens, default=0) < 0 or not np.isfinite(result).all():
            raise NumericError(BROKEN)
        return result
