"""Numbers per class of tokens: what a constraint has to know of a vocabulary.

A format (`dllm.structured`) treats many tokens alike.  Per row and class it needs the sum of the
probabilities and the likeliest or a drawn token: a few hundred numbers in place of the logits.
Tokens of a class are put side by side, so that each class is one segment.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...core.canvas import IntArray
from .filters import FAR, LOWEST


@dataclass(frozen=True, slots=True)
class Segments:
    """The tokens of a range of ids that belong to some class, side by side: their ``columns`` (n,)
    in the range, the first of each segment (k,), the ``classes`` (k,) of the segments, and the
    segment of each column (n,)."""

    columns: torch.Tensor
    first: torch.Tensor
    classes: torch.Tensor
    segment: torch.Tensor


@dataclass(frozen=True, eq=False)
class TokenClasses:
    """Which class each id belongs to: ``of`` (V,) int, -1 for none; ``count`` classes.  Ids beyond
    belong to none."""

    of: IntArray
    count: int
    _cuts: dict[tuple[int, int, str], Segments] = field(default_factory=dict, repr=False)

    def cut(self, low: int, high: int, device: torch.device) -> Segments:
        """The segments of the ids in [low, high); remembered."""
        key = low, high, str(device)
        if key not in self._cuts:
            of = self.of[low:high]
            order = np.argsort(of, kind="stable")
            order = order[np.count_nonzero(of < 0) :]
            classes, first, counts = np.unique(of[order], return_index=True, return_counts=True)
            segment = np.repeat(np.arange(len(classes)), counts)
            arrays = (order, first, classes, segment)
            self._cuts[key] = Segments(
                *(torch.from_numpy(np.asarray(a, np.int64)).to(device) for a in arrays)
            )
        return self._cuts[key]


def reduce_classes(
    x: torch.Tensor, low: int, classes: TokenClasses, scale: float, temperature: float,
    noisy: torch.Tensor | None, lost: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Columns (R, C) of `reduce.Partial` from ``x`` (R, n) float32, the logits of the ids from
    ``low`` on.  ``noisy``, where tokens are drawn, is x / ``temperature`` with noise, in which
    tokens that filters drop, ``lost`` (R, n) bool, count `FAR` less."""
    cut = classes.cut(low, low + x.shape[1], x.device)
    empty = x.new_full((len(x), classes.count), -torch.inf)
    columns = dict.fromkeys(("class_best", "class_logit", "class_total"), empty)
    columns["class_token"] = torch.zeros_like(empty, dtype=torch.int64)
    warm = noisy is not None and (scale != temperature or lost is not None)
    if warm:
        columns["class_warm"] = empty
    if not len(cut.columns):
        return columns
    best, at, total, warmer = folded(x, noisy, cut, scale, temperature, warm and lost is None)
    if warm and lost is not None:
        warmer = folded(
            x.add(lost, alpha=-FAR * temperature), None, cut, temperature, temperature, False
        ).total
    token = cut.columns[at.clamp(max=len(cut.columns) - 1)]  # NaN equals nothing
    found = {
        "class_best": best, "class_token": token + low, "class_logit": x.gather(1, token),
        "class_total": total,
    }  # fmt: skip
    if warmer is not None:
        found["class_warm"] = warmer
    return {name: full.index_copy(1, cut.classes, found[name]) for name, full in columns.items()}


class Folded(NamedTuple):
    """Of every segment (k,) in every row: the ``best`` value (R, k) and ``at`` which of the cut's
    columns it stands, the first of equal ones; the log-sums of exp(x / scale) and, where asked
    for, exp(x / temperature)."""

    best: torch.Tensor
    at: torch.Tensor
    total: torch.Tensor
    warm: torch.Tensor | None


def folded(
    x: torch.Tensor, noisy: torch.Tensor | None, cut: Segments, scale: float, temperature: float,
    warm: bool,
) -> Folded:  # fmt: skip
    """The segments of ``x`` (R, n); the best are those of ``noisy`` where it is given."""
    if x.device.type == "cuda" and find_spec("triton") is not None:
        from . import segments

        given = cut.columns, cut.first, scale, temperature, warm
        return Folded(*segments.folded(x, noisy, *given))
    mine = x.index_select(1, cut.columns)
    best, at = top, _ = _largest(mine, cut)
    if noisy is not None:
        best, at = _largest(noisy.index_select(1, cut.columns), cut)
    warmer = _log_sum(mine, top, cut, temperature) if warm else None
    return Folded(best, at, _log_sum(mine, top, cut, scale), warmer)


def _largest(x: torch.Tensor, cut: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of every segment and where it stands, the first of equal ones: both (R, k)."""
    if x.device.type == "cpu":  # torch's own reductions by index take ten times as long there
        values, first = x.numpy(), cut.first.numpy()
        best = np.maximum.reduceat(values, first, axis=1)
        place = np.arange(values.shape[1], dtype=np.int32)
        hit = np.where(values == best[:, cut.segment.numpy()], place, np.int32(values.shape[1]))
        at = np.minimum.reduceat(hit, first, axis=1).astype(np.int64)
        return torch.from_numpy(best), torch.from_numpy(at)
    segment = cut.segment.expand(len(x), -1)
    shape = (len(x), len(cut.first))
    top = x.new_full(shape, -torch.inf).scatter_reduce(1, segment, x, "amax")
    here = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
    here = torch.where(x == top.gather(1, segment), here, x.shape[1])
    last = torch.full(shape, x.shape[1], device=x.device)
    return top, last.scatter_reduce(1, segment, here, "amin")


def _log_sum(x: torch.Tensor, top: torch.Tensor, cut: Segments, scale: float) -> torch.Tensor:
    """log of the sum of exp(x / scale) over every segment, (R, k)."""
    safe = top.clamp(min=LOWEST)
    away = (x - safe.index_select(1, cut.segment)).div_(scale).exp_()
    if x.device.type == "cpu":
        sums = torch.from_numpy(np.add.reduceat(away.numpy(), cut.first.numpy(), axis=1))
    else:
        sums = torch.zeros_like(top).scatter_add(1, cut.segment.expand(len(x), -1), away)
    return sums.log_().add_(safe / scale)


def exponentials(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The exponentials of an array, in its place: NumPy takes one at a time without AVX-512."""
    tensor = torch.from_numpy(x)
    torch.exp(tensor, out=tensor)
    return x
