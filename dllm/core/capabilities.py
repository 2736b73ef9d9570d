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
# FreeDave and Prophet: what is decided early would be taken back by a reviser.
FINAL = Capability("commits that are never taken back", {"a reviser": "leave the reviser out"})
# S2D2: a forward that judges drafts says nothing of what is decided.
REPLACES = Capability(
    "decisions that are replaced and never taken back",
    {"a reviser": "use edit, or leave the reviser out"},
)
# Revisers and FreeDave look at decided tokens again, which padding would have replaced.
KEEPS_TEXT = Capability(
    "an end-of-text rule that overwrites nothing decided",
    {"an eos rule": "use eos_policy='prefix_complete'"},
)
# CreditDecoding and FreeDave reason about the likeliest token, not about one that was drawn.
GREEDY = Capability("greedy proposals", {"a temperature": "use temperature=0"})
# Schedules that are planned for a number of positions, before the first step.
FIXED_LENGTH = Capability(
    "a text whose length does not change", {"a length rule": "use length='fixed'"}
)
# Revisers that only take back, and parts that replace nothing: they go with a format.
CONSTRAINED = Capability(
    "tokens that are never rewritten", {"a sampler": "use a sampler without it, or no format"}
)

# Of the model: what a checkpoint was trained for.

# The cache `block`: keys of a finished block depend on nothing that comes later.
BLOCK_CAUSAL = Capability("block-causal attention", {"a model": "use cache='dual'"})
# S2D2: a model of blocks judges its drafts as one of blocks of one position, left to right.
LEFT_TO_RIGHT = Capability(
    "block-causal attention, with which it judges its own drafts from left to right",
    {"a model": "load a block-diffusion model (SDAR, LLaDA2, Fast-dLLM v2, Nemotron, or what "
                "`dllm train convert` makes), or use sampler='threshold',"},
)  # fmt: skip
# The cache `wedlm`: keys of a decided token depend on what was decided before it only.
DECIDED_FIRST = Capability(
    "attention in which decided tokens come before masks", {"a model": "use cache='dual'"}
)
# DMax mixes the mask's embedding with those of tokens.
MASK_EMBEDDING = Capability(
    "the embedding of a mask token",
    {"a model": "load a masked diffusion model, or use sampler='threshold',"},
)
# Revisers and stops read what the model says at decided positions: there its own token.
OWN_PREDICTIONS = Capability(
    "decided tokens that predict themselves",
    {"a model": "use a sampler that reads undecided positions only, such as threshold,"},
)
# Guidance compares with the text whose prompt is masked.
UNCONDITIONAL = Capability(
    "predictions of a text whose beginning is masked", {"a model": "use cfg_scale=0"}
)

# Samplers that change undecided positions at random, or say what stands there.
UNIFORM_NOISE = Capability(
    "uniform noise: undecided positions that hold random tokens",
    {"a model": "load DiffusionGemma or another model of that kind, or use sampler='threshold',"},
)

# A sampler that says at which temperature each step draws.
OWN_TEMPERATURE = Capability(
    "the temperatures of its own steps", {"a temperature": "set its t_min and t_max"}
)

# Of the cache: what is computed in a step, from all to part of what is asked.

# DAWN reads the attention between all positions; DAEDAL what the model says of all.
WHOLE_TEXT = Capability("a forward over the whole text at every step", {"a cache": NO_CACHE})
# WINO feeds every position of its block a second time, as a mask that does not see its token.
REPEATED_MASKS = Capability(
    "second predictions of the window's positions",
    {"a cache": NO_CACHE, "a model": "use a model that predicts in place, such as LLaDA,"},
)
# S2D2 feeds the drafts of a block once more, each seeing what is left of it, and masks beside them.
JUDGED = Capability("forwards that judge drafts", {"a cache": "use cache='block' or 'none'"})
# Prophet ends the text once all that is left is sure.
REGION_LOGITS = Capability(
    "predictions of every undecided position at every step", {"a cache": NO_CACHE}
)
# T2T edits read decided positions of the window, too.
WINDOW_LOGITS = Capability("predictions of the whole window at every step", {"a cache": NO_CACHE})
# Methods that compare with the step before: a cached prediction has not changed.
FRESH_LOGITS = Capability("predictions that every step computes anew", {"a cache": NO_CACHE})
# A window that is the whole region, where a cache plans for blocks.
WHOLE_REGION = Capability(
    "choices among the whole region", {"a cache": "use a window of blocks, or cache='none'"}
)
# LoPA, ETE and FreeDave feed several continuations, which share the keys and values of the row.
BRANCHES = Capability("several continuations of a row in one forward", {"a cache": NO_CACHE})
# The same of continuations that move the window, each its own way.
SLIDING_BRANCHES = Capability(
    "a cache that computes every branch of a sliding window", {"a cache": f"{NO_CACHE} or blocks"}
)
# WeDLM's models: a decided token is moved before the masks, its key with it.
REORDERING = Capability(
    "keys and values that follow the order of decisions",
    {"a cache": "use cache='wedlm' or cache='none'"},
)
# Models that read causally what stands before the open block: its keys are final, and nothing is
# left there that a cache could approximate.
PREFIX = Capability(
    "the exact keys of a prefix that is read causally",
    {"a cache": "use cache='block' or cache='none'"},
)
# The cache `dkv_greedy` computes the neighbourhood of what will be committed.
FORESIGHT = Capability(
    "commits that are known before the forward",
    {"a sampler": "use sampler='llada(remasking=random)'"},
)
