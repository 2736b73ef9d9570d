"""How often a drafter's tokens are accepted, by what it knows about them."""

from collections.abc import Hashable, Sequence

from ..base import ROOT, Feedback


class HitRates:
    """Share of judged tokens that were accepted, by key, from a prior of weight ``prior``: by
    default Beta(1, 1).

    The confidence of drafters that have no probabilities: controllers set their length by it.
    """

    def __init__(self, prior: float = 2.0) -> None:
        self._prior = prior
        self._judged: dict[Hashable, int] = {}
        self._accepted: dict[Hashable, int] = {}

    def __call__(self, key: Hashable, guess: float = 0.5) -> float:
        """``guess`` is where the prior lies."""
        accepted = self._accepted.get(key, 0) + self._prior * guess
        return accepted / (self._judged.get(key, 0) + self._prior)

    def update(self, key: Hashable, accepted: int, judged: int) -> None:
        """``accepted`` of ``judged`` tokens stood; those behind a rejection are not judged."""
        self._judged[key] = self._judged.get(key, 0) + judged
        self._accepted[key] = self._accepted.get(key, 0) + accepted

    def update_chain(self, key: Hashable, accepted: int, drafted: int) -> None:
        """A chain of which the first ``accepted`` tokens stood."""
        self.update(key, accepted, min(accepted + 1, drafted))

    def update_tree(self, keys: Sequence[Hashable], feedback: Feedback) -> None:
        """A draft with these ``keys``: what follows the root or an accepted token was judged."""
        path, kept = feedback.path, set(feedback.path)
        if len(feedback.emitted) <= len(path):  # the text ended with an accepted token
            path = path[:-1]
        for parent in (ROOT, *path):
            for child in feedback.draft.children(parent):
                self.update(keys[child], int(child in kept), 1)
