"""How often a drafter's tokens are accepted, by what it knows about them."""

from __future__ import annotations

from collections.abc import Hashable


class HitRates:
    """Share of judged tokens that were accepted, by key, from a Beta(1, 1) prior.

    The confidence of drafters that have no probabilities: controllers set their length by it.
    """

    def __init__(self) -> None:
        self._judged: dict[Hashable, int] = {}
        self._accepted: dict[Hashable, int] = {}

    def __call__(self, key: Hashable) -> float:
        return (self._accepted.get(key, 0) + 1) / (self._judged.get(key, 0) + 2)

    def update(self, key: Hashable, accepted: int, judged: int) -> None:
        """``accepted`` of ``judged`` tokens stood; those behind a rejection are not judged."""
        self._judged[key] = self._judged.get(key, 0) + judged
        self._accepted[key] = self._accepted.get(key, 0) + accepted

    def update_chain(self, key: Hashable, accepted: int, drafted: int) -> None:
        """A chain of which the first ``accepted`` tokens stood."""
        self.update(key, accepted, min(accepted + 1, drafted))
