"""From marginals to a draft: chains read off position by position."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ...core.canvas import IntArray
from ...core.registry import Registry
from ..base import Distribution, Draft, DraftPart
from .marginals import Marginals
from .proxies import NGram


@dataclass(frozen=True)
class SearchContext:
    """What a search may use besides the marginals: the committed ``prefix``, a causal ``proxy``,
    the temperature, the keys of the verifier's emission noise and the drafter's, and the round."""

    prefix: IntArray
    proxy: NGram = field(default_factory=NGram)
    temperature: float = 0.0
    noise_key: tuple[int, int] = (0, 0)
    draft_key: tuple[int, int] = (0, 3)
    round: int = 0

    def shown(self, marginals: Marginals, length: int, coupled: bool) -> Marginals:
        """The distributions to search: with the verifier's noise if it samples and that is wanted.

        Both sides then prefer the same tokens, and no probability has to travel.
        """
        if self.temperature > 0 and coupled:
            return marginals.perturbed(self.noise_key, length)
        return marginals


@dataclass
class Search(DraftPart):
    """Finds a draft in marginals, a tree with ``trees``; ``distribution``: that of its tokens."""

    distribution: ClassVar[Distribution] = Distribution.POINT
    trees: ClassVar[bool] = False

    def find(self, marginals: Marginals, length: int, context: SearchContext) -> Draft:
        """A chain of at most ``length`` tokens, or a tree of at most that depth."""
        raise NotImplementedError

    def draft(self, marginals: Marginals, tokens: object, **more: object) -> Draft:
        """A chain with what controllers want to know of it."""
        array = np.asarray(tokens, np.int64)
        return Draft(array, confidence=marginals.confidence[: len(array)], end=marginals.end,
                     source=self.name, **more)  # type: ignore[arg-type]  # fmt: skip


SEARCHES: Registry[Search] = Registry("search")
register = SEARCHES.register


@register("argmax")
@dataclass
class Argmax(Search):
    """The most probable token of every position, whatever stands beside it."""

    def find(self, marginals: Marginals, length: int, context: SearchContext) -> Draft:
        return self.draft(marginals, marginals.argmax[:length])


@register("coupled", paper="Coupling without Communication and Drafter-Invariant Speculative "
          "Decoding", arxiv="2408.07978")  # fmt: skip
@dataclass
class Coupled(Search):
    """Sample with the verifier's own noise, so that both draw the same token where they can.

    At temperature 0 there is no noise, and this is `argmax`.
    """

    def find(self, marginals: Marginals, length: int, context: SearchContext) -> Draft:
        shown = context.shown(marginals, length, coupled=True)
        return self.draft(marginals, shown.argmax[:length])


@register("sample")
@dataclass
class Sample(Search):
    """Draw every token from its marginal: the only chain that `ratio` and `block` can judge."""

    distribution = Distribution.MARGINALS

    def find(self, marginals: Marginals, length: int, context: SearchContext) -> Draft:
        noise = marginals.noise(context.draft_key, length, context.round)
        tokens = (marginals.log_q[:length] + noise).argmax(-1).cpu().numpy()
        log_q = marginals.log_q[:length].cpu().numpy()
        return self.draft(marginals, tokens, distribution=self.distribution, log_q=log_q)
