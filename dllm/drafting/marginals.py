"""What a forward of a diffusion drafter gives: a law per masked position, and their lattice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ..canvas import IntArray
from ..kernels.noise import row_gumbel
from .base import Array


@dataclass(frozen=True)
class Candidate:
    """A token of a column.  ``natural`` is False for an end token that is there only because it
    always is."""

    token: int
    logp: float
    natural: bool = True


@dataclass(frozen=True)
class Lattice:
    """Columns of candidates, most probable first; ``end_logp`` (depth,) is each column's best
    log-probability of an end token."""

    columns: list[list[Candidate]]
    end_logp: list[float]
    stop_ids: frozenset[int]


@dataclass(frozen=True, eq=False)
class Marginals:
    """Log-laws ``log_q`` (w, V) float32 of positions ``first``, ``first`` + 1, ..., after bans and
    temperature, over the verifier's vocabulary; ``stop_ids`` are the verifier's."""

    log_q: torch.Tensor
    first: int
    stop_ids: tuple[int, ...] = ()

    @classmethod
    def from_logits(
        cls, logits: torch.Tensor, first: int, *, vocab_size: int, banned: Sequence[int],
        temperature: float = 0.0, stop_ids: tuple[int, ...] = (),
    ) -> Marginals:  # fmt: skip
        """Ban ids, then normalise: the banned law *is* the drafter's law.  Columns beyond
        ``vocab_size`` are cut off, missing ones impossible."""
        x = logits[:, :vocab_size].float()
        if x.shape[1] < vocab_size:
            x = torch.nn.functional.pad(x, (0, vocab_size - x.shape[1]), value=-torch.inf)
        inside = [i for i in banned if i < vocab_size]
        if inside:
            x = x.index_fill(1, torch.tensor(inside, device=x.device), -torch.inf)
        return cls((x / (temperature or 1.0)).log_softmax(-1), first, stop_ids)

    def __len__(self) -> int:
        return len(self.log_q)

    @cached_property
    def _best(self) -> tuple[Array, IntArray]:
        values, tokens = self.log_q.max(-1)
        return values.double().exp().cpu().numpy(), tokens.cpu().numpy()

    @property
    def confidence(self) -> Array:
        """Largest probability per position (w,)."""
        return self._best[0]

    @property
    def argmax(self) -> IntArray:
        """Most probable token per position (w,)."""
        return self._best[1]

    @property
    def end(self) -> int | None:
        """Tokens before the first position whose most probable token ends the text."""
        found = np.flatnonzero(np.isin(self.argmax, self.stop_ids))
        return int(found[0]) if found.size else None

    def noise(self, key: tuple[int, int], count: int, step: int = 0) -> torch.Tensor:
        """Gumbel noise (count, V) of the first ``count`` positions for ``key`` = (seed, stream)."""
        seed, stream = key
        keys = [[seed, stream, self.first + i, step] for i in range(count)]
        at = torch.tensor(keys, dtype=torch.int64, device=self.log_q.device).view(-1, 4)
        return row_gumbel(at, 0, self.log_q.shape[1])

    def perturbed(self, key: tuple[int, int], count: int) -> Marginals:
        """The first ``count`` laws with the verifier's emission noise added, normalised again."""
        noisy = (self.log_q[:count] + self.noise(key, count)).log_softmax(-1)
        return Marginals(noisy, self.first, self.stop_ids)

    def lattice(self, length: int, mass: float = 0.8, cap: int = 15) -> Lattice:
        """Columns of the first ``length`` positions, pruned.

        A column holds the fewest most probable tokens that reach ``mass``, at most ``cap``, and
        always the best end token.  The lattice ends with the first column whose most probable token
        ends the text; an end token that is merely present never cuts (reconstructed: read
        literally, the rules of DiffuSpec, arXiv 2510.02358, contradict each other).
        """
        end = self.end
        length = length if end is None else min(length, end + 1)
        log_q = self.log_q[:length]
        cap = min(cap, log_q.shape[1])
        values, tokens = (x.cpu().numpy() for x in log_q.topk(cap, dim=-1))
        ends = self._best_ends(length)
        # columns that reach the mass with their first m tokens: m - 1 sums lie below it
        counts = 1 + (np.exp(values.astype(np.float64)).cumsum(1) < mass - 1e-6).sum(1)
        columns = []
        for i in range(length):
            count = min(int(counts[i]), cap)
            pairs = sorted(zip((-values[i, :count]).tolist(), tokens[i, :count].tolist(),
                               strict=True))  # fmt: skip
            column = [Candidate(token, -minus) for minus, token in pairs if minus < np.inf]
            if ends and all(c.token != ends[i].token for c in column):
                column.append(ends[i])
            columns.append(column)
        return Lattice(columns, [e.logp for e in ends], frozenset(self.stop_ids))

    def _best_ends(self, length: int) -> list[Candidate]:
        if not self.stop_ids:
            return []
        ids = torch.tensor(self.stop_ids, device=self.log_q.device)
        values, at = self.log_q[:length][:, ids].max(-1)
        return [Candidate(self.stop_ids[j], value, natural=False)
                for value, j in zip(values.tolist(), at.tolist(), strict=True)]  # fmt: skip
