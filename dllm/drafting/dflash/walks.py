"""Drafts read off with a head that looks at the token before: a chain, or the best prefixes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...core.canvas import IntArray
from ..base import Array
from ..drafters.followers import Followers
from ..drafters.hits import HitRates
from ..search.grow import Node, grow
from ..search.marginals import largest
from .heads import Bias, Floats, Sure

STRIDE = 4  # nodes after which it is asked whether more would be sent
BRANCHES = 8  # children of a node that are considered
CANDIDATES = 64  # most probable tokens of a row that a head may choose from
NGRAMS = (1, 2, 3, 5, 8)  # tokens in front of a place by which its followers in the text are found
FOLLOWERS = 3  # of a place, the latest
# a follower's chance before any was judged, by tokens in common
COPIED = {0: 0.0, 1: 0.15, 2: 0.4, 3: 0.5, 5: 0.6, 8: 0.75}
IMPOSSIBLE = -30.0  # a logarithmic probability
FAINT = math.log(0.05)  # a single path with less chance is not lengthened beyond the block
LEVELS = 10  # of a head's probability, by factors of sqrt(2), the last from 0.71 on
# what the chance of a candidate depends on: level of the head's probability (-1: it names it not),
# tokens in front of it that it followed before (0: never), and its place among such followers
Kind = tuple[int, int, int]
NO_KIND = (-1, 0, 0)


@dataclass(frozen=True, eq=False)
class Text:
    """What a text says about its own continuation: its ``followers``, the last tokens that are
    committed (``context``), and how often candidates of each kind were right (``hits``)."""

    followers: Followers
    context: tuple[int, ...]
    hits: HitRates

    def judged(
        self, context: Sequence[int], known: dict[int, float]
    ) -> dict[int, tuple[float, Kind]]:
        """Logarithm of the chance and kind of every token that may follow ``context``; ``known``
        are the logarithmic probabilities that a head gives."""
        copied = self.followers.latest(context, FOLLOWERS)
        result = {}
        for token in known.keys() | copied.keys():
            value = known.get(token, -math.inf)
            n, place = copied.get(token, (0, 0))
            if n == 0 and value < IMPOSSIBLE:
                continue
            level = (
                max(0, math.floor(LEVELS + 2 * value / math.log(2))) if value > IMPOSSIBLE else -1
            )
            kind = (min(level, LEVELS - 1), n, place)
            guess = max(math.exp(value), COPIED[n] / (1 + 2 * place))
            result[token] = math.log(min(self.hits(kind, guess), 0.999)), kind
        return result


@dataclass(frozen=True, eq=False)
class Walk:
    """A block's rows: of every row the ``logits`` (K, m) and ``ids`` (K, m) of its candidates, and
    the head's ``bias`` behind a token; ``noise`` (K, m) is the verifier's at ``temperature``;
    ``sure`` is how confident a head is, where one says so."""

    bias: Bias
    anchor: int
    logits: Floats
    ids: IntArray
    temperature: float = 0.0
    noise: Floats | None = None
    sure: Sure | None = None

    def after(self, token: int, depth: int) -> Floats:
        """Log-probabilities (m,) of the candidates of row ``depth`` behind ``token``."""
        x = self.logits[depth] + self.bias(token, depth)
        if self.temperature > 0:
            x = x / self.temperature
        if self.noise is not None:
            x = x + self.noise[depth]
        x = x - x.max()
        result: Floats = x - np.log(np.exp(x).sum())
        return result

    def grow(
        self, length: int, nodes: int, text: Text | None = None, branches: bool = True,
        size: Callable[[Array], int] | None = None,
    ) -> list[Node]:  # fmt: skip
        """The ``nodes`` most probable prefixes of at most ``length`` tokens; without ``branches``
        the best path.  ``size`` says of nodes' chances how many are sent: no others are looked for.

        As DDTree (arXiv 2604.12989) does with marginals; here the probability of a token is that
        behind its parent.  With ``text`` what followed the same tokens there stands among the
        candidates, and lengthens paths beyond the block; chances are then those of `Text`.  Nodes
        are marked with their kind and the tokens up to them.
        """

        def children(node: Node) -> list[tuple[float, int, tuple[Kind, tuple[int, ...]]]]:
            _, context = node.mark
            depth = node.depth + 1
            known: dict[int, float] = {}  # token -> its logarithmic probability, of the head
            if depth < len(self.logits):
                log_q = self.after(context[-1], depth)
                at = np.argpartition(log_q, -BRANCHES)[-BRANCHES:] if len(log_q) > BRANCHES else (
                    np.arange(len(log_q))
                )  # fmt: skip
                known = dict(zip(self.ids[depth, at].tolist(), log_q[at].tolist(), strict=True))
            elif not branches and node.score <= FAINT:
                return []
            judged = {token: (value, NO_KIND) for token, value in known.items()}
            if text is not None:
                judged = text.judged(context, known)
            found = [(value, token, (kind, (*context[-NGRAMS[-1] :], token)))
                     for token, (value, kind) in judged.items()]  # fmt: skip
            if branches or not found:
                return found
            best = max(found, key=lambda one: one[0])
            if self.sure is not None and depth < len(self.logits):
                best = (math.log(max(self.sure(context[-1], depth), 1e-9)), *best[1:])
            return [best]

        def enough(tree: Sequence[Node], best: Node) -> bool:
            if size is None or not tree or len(tree) % STRIDE:
                return False
            rest = [best.score] * (nodes - len(tree))  # none of them has more
            return size(np.exp([node.score for node in tree] + rest)) <= len(tree)

        start = (self.anchor,) if text is None else text.context
        return grow(children, nodes, length, (NO_KIND, start), enough=enough)


def candidates(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows (K, v) the largest logits (K, m) in float32, in order, and their places (K, m)."""
    values, at = largest(logits.float(), min(CANDIDATES, logits.shape[1]))
    values, order = values.sort(descending=True, stable=True)
    return values, at.gather(1, order)
