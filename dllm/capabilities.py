"""What parts of a composition need of one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Capability:
    """Something one part needs and another offers.

    ``remedies``: what kinds of part have to offer it ("a scorer", "a cache", ...), each with what
    to do where it is missing, for errors; "" lists the parts that offer it.
    """

    name: str
    remedies: Mapping[str, str] = field(compare=False)

    def __str__(self) -> str:
        return self.name


NO_CACHE = "use cache='none'"

PROBABILITY = Capability("probability scores", {"a scorer": ""})
ENTROPY = Capability("negative-entropy scores", {"a scorer": ""})
FIXED_WINDOW = Capability("a window that stays until it is decided", {"a window": "use blocks"})
REPEATABLE = Capability(
    "steps that follow from the row alone",
    {"a window": "use blocks", "a scorer": "use prob", "a selector": "use threshold or fixed"},
)
FINAL = Capability("decisions that nobody takes back", {"a reviser": "leave the reviser out"})
KEEPS_TEXT = Capability(
    "an end-of-text rule that overwrites nothing decided",
    {"an eos rule": "use eos_policy='prefix_complete'"},
)
GREEDY = Capability("greedy proposals", {"a temperature": "use temperature=0"})
BLOCK_CAUSAL = Capability("block-causal attention", {"a model": "use cache='dual'"})
DECIDED_FIRST = Capability(
    "attention in which decided tokens come before masks", {"a model": "use cache='dual'"}
)
REORDERING = Capability(
    "keys and values that follow the order of decisions",
    {"a cache": "use cache='wedlm' or cache='none'"},
)
OWN_PREDICTIONS = Capability(
    "decided tokens that predict themselves",
    {"a model": "use a sampler that reads undecided positions only, such as threshold,"},
)
UNCONDITIONAL = Capability(
    "predictions of a text whose beginning is masked", {"a model": "use cfg_scale=0"}
)
REGION_LOGITS = Capability(
    "predictions of every undecided position at every step", {"a cache": NO_CACHE}
)
WINDOW_LOGITS = Capability("predictions of the whole window at every step", {"a cache": NO_CACHE})
COMMITTED_LOGITS = Capability(
    "predictions of decided positions at every step", {"a cache": NO_CACHE}
)
FRESH_LOGITS = Capability("predictions that every step computes anew", {"a cache": NO_CACHE})
WHOLE_REGION = Capability(
    "choices among the whole region", {"a cache": "use a window of blocks, or cache='none'"}
)
BRANCHES = Capability("several continuations of a row in one forward", {"a cache": NO_CACHE})
SLIDING_BRANCHES = Capability(
    "branches whose windows slide, each computed anew", {"a cache": f"{NO_CACHE} or blocks"}
)
ATTENTION_MAPS = Capability(
    "the attention between all positions at every step", {"a cache": NO_CACHE}
)
FIXED_LENGTH = Capability(
    "a text whose length does not change", {"a length rule": "use length='fixed'"}
)
ALL_LOGITS = Capability(
    "predictions of the whole answer, decided positions included, at every step",
    {"a cache": NO_CACHE},
)
SHADOW = Capability(
    "second predictions of the window's positions",
    {"a cache": NO_CACHE, "a model": "use a model that predicts in place, such as LLaDA,"},
)
FORESIGHT = Capability(
    "commits that are known before the forward",
    {"a sampler": "use sampler='llada(remasking=random)'"},
)
CONSTRAINED = Capability(
    "tokens that nobody rewrites", {"a sampler": "use a sampler without it, or no format"}
)
DSB_CACHE = Capability(
    "what the released code of DSB does beside its cache",
    {"a cache": "use cache='dsb(official=True)'", "a sampler": "use sampler='dsb(official=True)'"},
)
