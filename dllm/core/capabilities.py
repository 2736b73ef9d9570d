"""What parts of a composition need of one another."""

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

# Of the row: what the parts of a sampler need of one another.

# Selectors compare scores with thresholds, which are meant for one of the two scales.
PROBABILITY = Capability("probability scores", {"a scorer": ""})
ENTROPY = Capability("negative-entropy scores", {"a scorer": ""})
# Quotas and revisers count within a block, which therefore must not move.
FIXED_WINDOW = Capability("a window that stays until it is decided", {"a window": "use blocks"})
# FreeDave takes a step ahead and compares: the same row has to decide the same again.
REPEATABLE = Capability(
    "steps that follow from the row alone",
    {"a window": "use blocks", "a scorer": "use prob", "a selector": "use threshold or fixed"},
)
# FreeDave and Prophet decide early, S2D2 by drafts: a reviser may undo neither.
FINAL = Capability("commits that are never taken back", {"a reviser": "leave the reviser out"})
# The same of one that puts other tokens there; so may no part where the text has a format.
CONSTRAINED = Capability("tokens that are never rewritten", {"a reviser": "leave the reviser out"})
# Revisers and FreeDave look at decided tokens again, which padding would have replaced.
KEEPS_TEXT = Capability(
    "an end-of-text rule that overwrites nothing decided",
    {"an eos rule": "use eos_policy='prefix_complete'"},
)
# CreditDecoding and FreeDave reason about the likeliest token, not about one that was drawn;
# DiffusionGemma's rule draws at temperatures of its own.
GREEDY = Capability("proposals at temperature 0", {"a temperature": "use temperature=0"})
# Schedules that are planned for a number of positions, before the first step.
FIXED_LENGTH = Capability(
    "a text whose length does not change", {"a length rule": "use length='fixed'"}
)

# Of the model: what a checkpoint was trained for.

# The cache `block`: keys of a finished block depend on nothing that comes later.  S2D2: the model
# judges its drafts as one of blocks of one position.  Models that read causally what stands before
# the open block: nothing is left there that a cache could approximate.
BLOCK_CAUSAL = Capability(
    "block-causal attention",
    {"a model": "load a block-diffusion model (SDAR, LLaDA2, Fast-dLLM v2, Nemotron, or what "
                "`dllm train convert` makes), or use cache='dual' and sampler='threshold'",
     "a cache": "use cache='block' or cache='none'"},
)  # fmt: skip
# The cache `wedlm`: keys of a decided token depend on what was decided before it only.
DECIDED_FIRST = Capability(
    "keys and values that follow the order of decisions",
    {"a model": "use cache='dual'", "a cache": "use cache='wedlm' or cache='none'"},
)
# DMax mixes the mask's embedding with those of tokens, guidance masks the prompt, S2D2 feeds masks
# beside its drafts.
MASKED = Capability(
    "masks at undecided positions, in any order",
    {"a model": "leave it out, or load a masked diffusion model such as LLaDA"},
)
# Revisers and stops read what the model says at decided positions: there its own token.
OWN_PREDICTIONS = Capability(
    "decided tokens that predict themselves",
    {"a model": "use a sampler that reads undecided positions only, such as threshold,"},
)
# Samplers that change undecided positions at random, or say what stands there.
UNIFORM_NOISE = Capability(
    "uniform noise: undecided positions that hold random tokens",
    {"a model": "load DiffusionGemma or another model of that kind, or use sampler='threshold',"},
)

# Of the cache: what is computed in a step, from all to part of what is asked.

# DAEDAL reads what the model says of all positions.
WHOLE_TEXT = Capability("a forward over the whole text at every step", {"a cache": NO_CACHE})
# T2T edits read decided positions of the window, Prophet all that is undecided.
ALL_LOGITS = Capability("predictions of all that is read at every step", {"a cache": NO_CACHE})
# Methods that compare with the step before: a cached prediction has not changed.
FRESH_LOGITS = Capability("predictions that every step computes anew", {"a cache": NO_CACHE})
# LoPA, ETE and FreeDave feed several continuations, which share the keys and values of the row.
BRANCHES = Capability("several continuations of a row in one forward", {"a cache": NO_CACHE})
# The same of continuations that move the window, each its own way.
SLIDING_BRANCHES = Capability(
    "a cache that computes every branch of a sliding window", {"a cache": f"{NO_CACHE} or blocks"}
)
# The cache `dkv_greedy` computes the neighbourhood of what will be committed.
FORESIGHT = Capability(
    "commits that are known before the forward",
    {"a sampler": "use sampler='llada(remasking=random)'"},
)
