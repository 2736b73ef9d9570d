"""What a drafter's forward gives: a distribution per masked position, and their lattice."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple, Self

import numpy as np
import torch

from ...core.canvas import IntArray
from ...kernels.noise import row_gumbel, row_gumbel_at
from ..base import Array

NARROW = 8192  # columns up to which one partition of all rows is faster than looking for pieces


class Candidate(NamedTuple):
    """A token of a column."""

    token: int
    logp: float


@dataclass(frozen=True)
class Lattice:
    """Columns of candidates, most probable first; ``end_logp`` (depth,) is each column's best
    log-probability of an end token."""

    columns: list[list[Candidate]]
    end_logp: list[float]
    stop_ids: frozenset[int]


@dataclass(frozen=True, eq=False)
class Marginals:
    """Log-distributions ``log_q`` (w, V) float32 of positions ``first``, ``first`` + 1, ..., after
    bans and temperature, over the verifier's vocabulary; ``stop_ids`` are the verifier's.

    With ``ids`` (w, m) int64 the columns of ``log_q`` (w, m) are these tokens, and no others.
    """

    log_q: torch.Tensor
    first: int
    stop_ids: tuple[int, ...] = ()
    ids: torch.Tensor | None = None

    @classmethod
    def from_logits(
        cls, logits: torch.Tensor, first: int, *, vocab_size: int, banned: Sequence[int],
        temperature: float = 0.0, stop_ids: tuple[int, ...] = (),
    ) -> Self:  # fmt: skip
        """Ban ids, then normalise: the banned distribution *is* the drafter's distribution.
        Columns beyond ``vocab_size`` are cut off, missing ones impossible."""
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
        values, at = largest(self.log_q, 1)
        return values[:, 0].double().cpu().numpy(), self._named(at)[:, 0].cpu().numpy()

    def _named(self, columns: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The tokens of ``columns`` (r, n), of all rows or of some."""
        if self.ids is None:
            return columns
        return (self.ids if rows is None else self.ids[rows])[: len(columns)].gather(1, columns)

    @property
    def confidence(self) -> Array:
        """Largest probability per position (w,)."""
        return np.exp(self._best[0])

    @property
    def argmax(self) -> IntArray:
        """Most probable token per position (w,)."""
        return self._best[1]

    @property
    def end(self) -> int | None:
        """Tokens before the first position whose most probable token ends the text."""
        best = self.argmax.tolist()  # short: plain loops are faster than `isin`
        return next((i for i, token in enumerate(best) if token in self.stop_ids), None)

    def noise(self, key: tuple[int, int], count: int, step: int = 0) -> torch.Tensor:
        """Gumbel noise (count, V) of the first ``count`` positions for ``key`` = (seed, stream)."""
        return row_gumbel(self._keys(key, count, step), 0, self.log_q.shape[1])

    def noise_at(self, key: tuple[int, int], tokens: torch.Tensor) -> torch.Tensor:
        """The same noise of ``tokens`` (count, n) only."""
        return row_gumbel_at(self._keys(key, len(tokens)), tokens)

    def _keys(self, key: tuple[int, int], count: int, step: int = 0) -> torch.Tensor:
        rows = [[*key, self.first + i, step] for i in range(count)]
        return torch.tensor(rows, dtype=torch.int64, device=self.log_q.device).view(-1, 4)

    def perturbed(self, key: tuple[int, int], count: int, cap: int = 256) -> Self:
        """The first ``count`` distributions with the verifier's emission noise, normalised again.

        Only the ``cap`` most probable tokens of a position get noise, which costs more than all
        else here; the others become impossible.
        """
        cap = min(cap, self.log_q.shape[1])
        values, at = largest(self.log_q[:count], cap)
        tokens = self._named(at)
        noisy = (values + self.noise_at(key, tokens)).log_softmax(-1)
        return replace(self, log_q=noisy, ids=tokens)

    def lattice(self, length: int, mass: float = 0.8, cap: int = 15) -> Lattice:
        """Columns of the first ``length`` positions, pruned.

        A column holds the fewest most probable tokens that reach ``mass``, at most ``cap``, and
        always the best end token.  The lattice ends with the first column whose most probable token
        ends the text; an end token that is merely present never cuts (reconstructed: read
        literally, the rules of DiffuSpec, arXiv 2510.02358, contradict each other).
        """
        end = self.end
        length = length if end is None else min(length, end + 1)
        ends = self._best_ends(length)
        columns = []
        for column, e in zip_longest(self._columns(length, mass, cap), ends):
            if e is not None and all(c.token != e.token for c in column):
                column.append(e)
            columns.append(column)
        return Lattice(columns, [e.logp for e in ends], frozenset(self.stop_ids))

    def _columns(self, length: int, mass: float, cap: int) -> list[list[Candidate]]:
        """Natural candidates of the first ``length`` positions, by probability, then id."""
        best = zip(self.argmax[:length].tolist(), self._best[0][:length].tolist(), strict=True)
        columns = [[Candidate(token, logp)] for token, logp in best]
        # where the first token has the mass, no sorting is needed
        flat = np.flatnonzero(self.confidence[:length] < mass - 1e-6)
        if 2 * flat.size > length:  # sorting a row costs less than twice what copying it does
            flat = np.arange(length)
        if not flat.size:
            return columns
        rows = torch.from_numpy(flat).to(self.log_q.device)
        log_q = self.log_q[:length] if flat.size == length else self.log_q[rows]
        most, at = largest(log_q, min(cap, log_q.shape[1]))
        most, order = most.sort(descending=True)
        tokens = self._named(at.gather(1, order), rows).cpu().numpy()
        values = most.cpu().numpy()
        # columns that reach the mass with their first m tokens: m - 1 sums lie below it
        counts = 1 + (np.exp(values.astype(np.float64)).cumsum(1) < mass - 1e-6).sum(1)
        for row, v, t, count in zip(flat.tolist(), values, tokens, counts.tolist(), strict=True):
            pairs = sorted(zip((-v[:count]).tolist(), t[:count].tolist(), strict=True))
            columns[row] = [Candidate(token, -minus) for minus, token in pairs if minus < np.inf]
        return columns

    def _best_ends(self, length: int) -> list[Candidate]:
        if not self.stop_ids:
            return []
        log_q, ids = self.log_q[:length], self.ids
        if ids is None:
            columns = [log_q[:, stop] for stop in self.stop_ids]
        else:
            columns = [log_q.where(ids[:length] == stop, -torch.inf).amax(-1)
                       for stop in self.stop_ids]  # fmt: skip
        values, at = torch.stack(columns, 1).max(-1)
        return [Candidate(self.stop_ids[j], value)
                for value, j in zip(values.tolist(), at.tolist(), strict=True)]  # fmt: skip


def largest(x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``n`` largest of every row and their columns, in any order; of equals the first where
    ``n`` is 1.  On a CPU NumPy's vectorised search is several times as fast as ``topk``."""
    if x.device.type != "cpu":
        return x.topk(n, dim=-1, sorted=False)
    rows = x.numpy()
    if n == 1:
        result = rows.argmax(1)[:, None]
    elif rows.shape[1] < NARROW:
        result = np.argpartition(rows, -n, axis=1)[:, -n:]
    else:
        result = np.stack([_top(row, n) for row in rows])
    at = torch.from_numpy(np.ascontiguousarray(result))
    return x.gather(1, at), at


def _top(row: Array, n: int) -> IntArray:
    """Columns of the ``n`` largest.  As many pieces have a maximum that reaches the n-th largest
    maximum, so only what reaches it can be among them."""
    # about three times as many pieces as are sought, or as many as vectorise well
    width = len(row) // max(3 * n, 192) or 1
    edge = len(row) - len(row) % width
    heads = np.concatenate([row[:edge].reshape(width, -1).max(0), row[edge:]])
    least = np.partition(heads, -n)[-n]
    near = np.flatnonzero(row >= least)
    return near[np.argpartition(row[near], -n)[-n:]]
