"""What parts of a composition need of one another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capability:
    """Something one part needs and another offers; ``source`` says what kind of part can offer
    it ("a scorer", "a selector", "a cache", "a sampler"), ``remedy`` names one that does."""

    name: str
    source: str
    remedy: str = ""

    def __str__(self) -> str:
        return self.name


PROBABILITY = Capability("probability scores", "a scorer")
ENTROPY = Capability("negative-entropy scores", "a scorer")
REGION_LOGITS = Capability(
    "predictions of every undecided position at every step", "a cache", "cache='none'"
)
WINDOW_LOGITS = Capability(
    "predictions of the whole window at every step", "a cache", "cache='none'"
)
FORESIGHT = Capability(
    "commits that are known before the forward", "a sampler", "sampler='llada(remasking=random)'"
)
