"""Which positions of a continuation to mask, and what each prediction counts, to score it.

The likelihood of a masked-diffusion model is bounded by an average over masks: with the number k of
masked positions uniform on 1..L and the positions uniform given k, E[L / k * (sum of the masked
positions' log-probabilities)] <= log p (LLaDA, arXiv 2502.09992, equation 14).  An estimator draws
masks and weights such that the weighted log-probabilities sum to an estimate of that average.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
import numpy.typing as npt
import torch

from ..core.canvas import BoolArray
from ..core.errors import ConfigError, UnknownNameError

Weights = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Masking:
    """``masked`` (n, L) bool: what row j hides; ``weight`` (n, L) float64: what the log-probability
    of a position counts in it, 0 where it is not asked for.  The estimate is the sum over all.

    ``spread`` says what the standard error is taken from: "exact" (there is none), "pairs"
    (neighbouring strata, which overstates it a little), "rows" (independent rows).
    """

    masked: BoolArray
    weight: Weights
    spread: str

    def standard_error(self, values: Weights) -> float:
        """Of the estimate, from the rows' contributions (n,); infinite for a single row."""
        n = len(values)
        if self.spread == "exact":
            return 0.0
        if n < 2:
            return float("inf")
        if self.spread == "rows":
            return float(values.std(ddof=1) * np.sqrt(n))
        differences = values[: n - n % 2].reshape(-1, 2) @ np.array([1.0, -1.0])
        return float(np.sqrt((differences**2).sum() * n / (n - n % 2)))


# (continuation length, prompt length, rows, seed) -> draws
Estimator = Callable[[int, int, int, tuple[int, int]], Masking]


def all_subsets(length: int) -> Masking:
    """Every mask there is, with its probability: the bound itself, in 2**L - 1 rows."""
    rows = [c for k in range(1, length + 1) for c in combinations(range(length), k)]
    masked = np.zeros((len(rows), length), np.bool_)
    for row, chosen in zip(masked, rows, strict=True):
        row[list(chosen)] = True
    share = np.array([1 / (k * comb(length, k)) for k in masked.sum(1)])
    return Masking(masked, masked * share[:, None], "exact")


def stratified(length: int, prompt: int, rows: int, seed: tuple[int, int]) -> Masking:
    """k from every one of ``rows`` equal parts of 1..L, then a random subset: unbiased.

    Where there are no more than ``rows`` masks in all, each is used once and the bound is exact; a
    single token needs one forward.
    """
    if length < 30 and 2**length - 1 <= rows:
        return all_subsets(length)
    rng = np.random.default_rng(seed)
    count = (length * (np.arange(rows) + rng.random(rows)) / rows).astype(np.int64) + 1
    count = np.minimum(count, length)  # rounding up to 1.0 is possible in principle
    masked = rng.random((rows, length)).argsort(1).argsort(1) < count[:, None]
    return Masking(masked, masked * (length / count / rows)[:, None], "pairs")


def llada(length: int, prompt: int, rows: int, seed: tuple[int, int]) -> Masking:
    """The official estimator of LLaDA, draw for draw under the same torch seed.

    Batches of 32: one k, the others at equal distances from it, rounded half to even, which gives
    even k too much weight when L / 32 is a multiple of one half.  Kept for comparable numbers.
    """
    batch = min(rows, 32)
    if rows % batch:
        raise ConfigError(f"the llada estimator takes a multiple of {batch} samples, not {rows}")
    noise = torch.Generator().manual_seed(sum(seed))
    masked = np.zeros((rows, length), np.bool_)
    count = np.zeros(rows, np.int64)
    for start in range(0, rows, batch):
        k = int(torch.randint(1, length + 1, (), generator=noise))
        spaced = torch.linspace(float(k), k + (batch - 1) * (length / batch), steps=batch)
        count[start : start + batch] = ((torch.round(spaced).long() - 1) % length + 1).numpy()
        for row in range(start, start + batch):
            masked[row] = torch.randperm(length, generator=noise).numpy() < count[row]
    return Masking(masked, masked * (length / count / rows)[:, None], "rows")


def dream(length: int, prompt: int, rows: int, seed: tuple[int, int], eps: float = 1e-3) -> Masking:
    """The official estimator of Dream, draw for draw under the same torch seed, in one batch.

    Each position is masked with probability t, the t of the rows at equal distances; weight 1 / t.
    The first position of the sequence and the last one, an end token, stay visible.
    """
    noise = torch.Generator().manual_seed(sum(seed))
    t = (1 - eps) * ((torch.rand(1, generator=noise) + torch.arange(rows) / rows) % 1) + eps
    masked = torch.rand((rows, prompt + length), generator=noise) < t[:, None]
    masked[:, 0] = masked[:, -1] = False
    chosen = masked[:, prompt:].numpy()
    return Masking(chosen, chosen / t[:, None].double().numpy() / rows, "rows")


def left_to_right(length: int, prompt: int, rows: int, seed: tuple[int, int]) -> Masking:
    """The chain rule in reading order, one forward per position: no bound but the likelihood of
    writing the text in that order (Dream's ``ar_ftb``)."""
    return Masking(np.triu(np.ones((length, length), np.bool_)), np.eye(length), "exact")


def right_to_left(length: int, prompt: int, rows: int, seed: tuple[int, int]) -> Masking:
    """The chain rule from the end (Dream's ``ar_btf``)."""
    return Masking(np.tril(np.ones((length, length), np.bool_)), np.eye(length), "exact")


ESTIMATORS: dict[str, Estimator] = {
    "stratified": stratified, "llada": llada, "dream": dream,
    "left_to_right": left_to_right, "right_to_left": right_to_left,
}  # fmt: skip
OFFICIAL = {"llada", "dream"}
ENDS_WITH_EOS = {"dream"}  # estimators that score the continuation and its end


def estimator(name: str) -> Estimator:
    """The estimator of that name.  Raises `UnknownNameError`."""
    if name not in ESTIMATORS:
        raise UnknownNameError("estimator", name, ESTIMATORS)
    return ESTIMATORS[name]
