"""How a recorded official case is expressed as a call of this library."""

from __future__ import annotations

from typing import Any, NamedTuple

# Replays decode everything and keep the mask token proposable, as the official loops do.
OFFICIAL = {"eos_policy": "none", "suppress_mask": False}


class Call(NamedTuple):
    """Arguments of `dllm.generate`."""

    sampler: str
    cache: str
    arguments: dict[str, Any]


def call_of(case: dict[str, Any]) -> Call:
    """The call that reproduces ``case``."""
    builder = BUILDERS[case["algorithm"]]
    sampler, cache, arguments = builder(case)
    return Call(sampler, cache, {"max_new_tokens": case["gen_length"], **OFFICIAL, **arguments})


def _llada(case: dict[str, Any]) -> Call:
    keys = ("block_length", "cfg_scale")
    return Call("llada", "none", {"steps": case["num_steps"]} | {k: case[k] for k in keys})


def _fast_dllm_llada(case: dict[str, Any]) -> Call:
    arguments: dict[str, Any] = {"block_length": case["block_length"]}
    sampler = {
        "fixed": "llada",
        "threshold": "threshold(tau={threshold})",
        "factor": "factor(factor={factor}, official=True)",
    }[case["policy"]]
    if case["policy"] == "fixed":
        arguments["steps"] = case["num_steps"]
    return Call(sampler.format(**case), case["cache"], arguments)


def _dream(case: dict[str, Any]) -> Call:
    filters = {key: case[key] for key in ("top_p", "top_k") if case.get(key) is not None}
    sampler = "dream(alg={alg}, alg_temp={alg_temp}, eps={eps})".format(**case)
    return Call(sampler, "none", {"steps": case["num_steps"], **filters})


def _fast_dllm_dream(case: dict[str, Any]) -> Call:
    # This code keeps transformers' own default of top_k=50 for its scores.
    filters = {"top_k": 50}
    if case["variant"] == "nocache_threshold":
        sampler = "capped_threshold(tau={threshold})".format(**case)
        return Call(sampler, "none", {"steps": case["num_steps"], **filters})
    blocks = "+blocks({block_length}, force_first=True)".format(**case)
    cache = case["variant"].removesuffix("_cache")
    if case["alg"] == "confidence_threshold":
        return Call("threshold(tau={threshold})".format(**case) + blocks, cache, filters)
    return Call("dream(alg=entropy)" + blocks, cache, {"steps": case["num_steps"], **filters})


def _dparallel(case: dict[str, Any]) -> Call:
    sampler = "dparallel(tau={threshold})".format(**case)
    return Call(sampler, case.get("cache", "none"), {"block_length": case["block_length"]})


BUILDERS = {
    "llada_generate": _llada,
    "fastdllm_llada": _fast_dllm_llada,
    "dream_diffusion_generate": _dream,
    "fastdllm_dream": _fast_dllm_dream,
    "dparallel_llada": _dparallel,
    "dparallel_dream": _dparallel,
}
