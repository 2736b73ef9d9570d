"""What is known of each row after the head, and what may be asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch

from ...core.errors import ConfigError
from ..transfer import ToHost
from .classes import TokenClasses
from .filters import PLAIN, Filters

# either every field is a torch tensor on the device, or (after `numpy`) every field is NumPy
Array: TypeAlias = Any
T = TypeVar("T")

COLDEST = 1e-6  # below it noise would decide between logits that differ by rounding only

OPTIONAL = frozenset({"margin", "gap", "entropy", "max_logprob"})


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """A few numbers per row, in place of a row of logits.

    ``token`` (R,) int64 is the proposal, ``logprob`` (R,) float32 its log-probability.  The
    others are None unless asked for: ``margin`` p1 - p2, ``gap`` top logit minus second logit of
    the clean logits, ``entropy`` in nats and never negative, ``max_logprob``, each (R,) float32;
    ``top_token`` (R, k) int64 and ``top_logprob`` (R, k) float32, most likely first, ties to the
    lowest id; ``select_logprob`` (R,) float32 of the ids in ``select``.

    With C ``classes``, all (R, C): ``class_token`` int64 the proposal among the tokens of a class,
    ``class_token_logprob`` its log-probability, ``class_logprob`` that of the whole class, both
    float32; ``class_weight`` float32, where proposals are drawn at a temperature that the
    log-probabilities do not describe, the same at the temperature, up to a constant per row.

    Log-probabilities near zero keep their relative precision: -1e-9 is not rounded to 0.
    ``soft`` (R, d) float32 is the expected embedding under the clean distribution; it stays on the
    device, is no column, and `numpy` leaves it out.

    A row that allows nothing (all -inf) has token 0, all log-probabilities -inf, margin, gap and
    entropy 0.  With a single possible token, gap is +inf.
    """

    token: Array
    logprob: Array
    margin: Array | None = None
    gap: Array | None = None
    entropy: Array | None = None
    max_logprob: Array | None = None
    top_token: Array | None = None
    top_logprob: Array | None = None
    select_logprob: Array | None = None
    class_token: Array | None = None
    class_token_logprob: Array | None = None
    class_logprob: Array | None = None
    class_weight: Array | None = None
    soft: Array | None = None

    def numpy(self) -> TokenStatistics:
        """The same with NumPy arrays: views for CPU tensors, one copy for another device."""
        names, tensors = zip(*self.columns(), strict=True)
        return TokenStatistics(**dict(zip(names, ToHost(tensors).arrays(), strict=True)))

    def columns(self) -> Iterator[tuple[str, Array]]:
        """The fields that were computed, by name."""
        for name in FIELDS:
            column = getattr(self, name)
            if column is not None:
                yield name, column


FIELDS = tuple(f.name for f in fields(TokenStatistics) if f.name != "soft")


def stack(parts: Sequence[T]) -> T:
    """The same numbers of different rows, as one; ``parts`` are of one dataclass."""
    if len(parts) == 1:
        return parts[0]
    kind: Any = type(parts[0])
    columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(kind)}
    whole: T = kind(**{name: torch.cat(c) for name, c in columns.items() if c[0] is not None})
    return whole


def mended(
    result: TokenStatistics, missed: torch.Tensor | None, x: torch.Tensor, inputs: Inputs,
    statistics: Callable[[torch.Tensor, Inputs], TokenStatistics],
) -> TokenStatistics:  # fmt: skip
    """``result`` with rows ``missed`` (R,) bool done again, from those of ``x`` and ``inputs``."""
    if missed is None or not bool(missed.any()):
        return result
    which = missed.nonzero().flatten()
    other = statistics(x[which], inputs.take(which))
    columns = {f: (getattr(result, f), getattr(other, f)) for f in FIELDS}
    return TokenStatistics(
        **{f: a.index_copy(0, which, b) for f, (a, b) in columns.items() if a is not None}
    )


@dataclass(frozen=True)
class Options:
    """Arguments of `token_statistics` that hold for all rows."""

    filters: Filters = PLAIN
    tempered: bool = False
    top: int = 0
    needs: frozenset[str] = OPTIONAL
    warm: bool = False  # also sum at the temperature, for candidates
    classes: TokenClasses | None = None
    inverse: bool = False  # draw by the cumulative sum and one number, not by noise per token
    floor: float = 0.0  # how much of what draws are from is uniform

    def __post_init__(self) -> None:
        """Refuse what would otherwise give a wrong answer."""
        filters = self.filters
        if not (0 <= filters.temperature < math.inf) or filters.top_k < 0 or self.top < 0:
            raise ConfigError(
                f"temperature={filters.temperature}, top_k={filters.top_k}, top={self.top}: "
                "expected finite numbers >= 0 (0 switches each of them off)"
            )
        if not 0 <= filters.min_p <= 1:
            raise ConfigError(f"{filters}: min_p is a share from 0 (off) to 1")
        if self.inverse and self.classes is not None:
            raise ConfigError("classes of tokens are drawn by noise per token: drop uniforms")

    @cached_property
    def temperature(self) -> float:
        return self.filters.temperature

    @cached_property
    def filtered(self) -> bool:
        """Whether top-p, top-k or min-p can change anything."""
        return self.filters.cut and (self.tempered or self.temperature > 0)

    @cached_property
    def scale(self) -> float:
        """The temperature of the described distribution."""
        return self.filters.scale if self.tempered else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The other arguments of `token_statistics`, most of them with an entry per row."""

    banned: Sequence[int] | torch.Tensor | None = None
    banned_rows: torch.Tensor | None = None
    noise_keys: torch.Tensor | None = None
    select: torch.Tensor | None = None
    vocab_size: int | None = None
    uniforms: torch.Tensor | None = None
    embeddings: Callable[[int, int], torch.Tensor] | None = None
    lowered: tuple[torch.Tensor, float] | None = None

    def take(self, rows: torch.Tensor | slice) -> Inputs:
        def cut(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x[rows if isinstance(rows, slice) else rows.to(x.device)]

        return replace(
            self, banned_rows=cut(self.banned_rows), noise_keys=cut(self.noise_keys),
            select=cut(self.select), uniforms=cut(self.uniforms),
        )  # fmt: skip


def check_keys(options: Options, noise_keys: torch.Tensor | None, rows: int) -> None:
    """Refuse a draw without noise of its own for every row."""
    if not options.inverse and (noise_keys is None or noise_keys.shape != (rows, 4)):
        given = "none" if noise_keys is None else tuple(noise_keys.shape)
        raise ConfigError(
            f"temperature={options.temperature} draws noise and needs noise_keys of shape "
            f"({rows}, 4), got {given}: pass (seed, stream, position, step) of every row"
        )
