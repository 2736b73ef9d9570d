"""How recorded cases of methods published in 2026 are expressed as calls."""

from typing import Any

import numpy as np

from dllm.core.canvas import FloatArray, IntArray, UniformNoise

from .call import Call
from .quirks import RecordedDraws, parts


def _draft(case: dict[str, Any]) -> str:
    return "threshold(tau={threshold}, n={num_to_transfer})".format(**case)


def _canvas(case: dict[str, Any]) -> dict[str, Any]:
    """The official canvas ends with a block of the attention; its text is cut afterwards."""
    policy = "block_contains" if case.get("eos_early_stop") else "none"
    length = len(case["final"]) - len(case["prompt"])
    return {"max_new_tokens": length, "eos_policy": policy, "suppress_mask": False}


def edit(case: dict[str, Any]) -> Call:
    sampler = "+edit(tau={editing_threshold}, post_steps={max_post_steps})".format(**case)
    return Call(_draft(case) + sampler, "none", _canvas(case))


def remdm(case: dict[str, Any]) -> Call:
    arguments = {
        "max_new_tokens": case["gen_length"], "block_length": case["block_length"],
        "steps": case["num_steps"], "eos_policy": "block_contains", "suppress_mask": False,
    }  # fmt: skip
    sampler = parts("remdm(n={remdm_number})".format(**case))
    if case["sampling"] == "categorical":
        draws = tuple(tuple(map(tuple, step)) for step in case["samples"])
        sampler = (*sampler, RecordedDraws(draws))
    return Call(sampler, "none", arguments)


def dpad(case: dict[str, Any]) -> Call:
    arguments = {
        "max_new_tokens": case["gen_length"], "block_length": case["block_length"],
        "eos_policy": "block_contains", "suppress_mask": False,
    }  # fmt: skip
    sampler = "threshold(tau={threshold})".format(**case)
    if case["threshold"] is None:
        sampler, arguments["steps"] = "llada", case["num_steps"]
    if case["model"].startswith("dream"):
        arguments["top_k"] = 50  # transformers' own default
        if case["cache"] != "none":  # the cached code cannot predict a block's first position later
            sampler += "+force_first"
    cache = "dpad(base={cache}, dropout={dropout}, window={window}, number={preserved_tokens}"
    if case["dropout"] == "gaussian":
        cache += ", sigma={sigma}, scale={scale}"
    return Call(parts(sampler), cache.format(**case) + ")", arguments)


def s2d2(case: dict[str, Any]) -> Call:
    policy, dynamic = case["do_verify_policy"], case["do_verify_score_type"].endswith("dynamic")
    policies = {"mask_span_length": "span", "score_threshold": "score"}
    margin = case["token_acceptance_estimator"] == "hard_margin_threshold"
    options = {
        "policy": policies.get(policy, "hysteresis"), "dynamic": dynamic,
        "tau_span": case["min_ssd_span_length"], "tau_score": case["do_verify_score_threshold"],
        "tau_on": case["hysteresis_threshold_on"], "tau_off": case["hysteresis_threshold_off"],
        "c": case["score_penalty_coef"], "tau": case["threshold"],
        "estimator": "margin" if margin else "entropy",
        "margin": case["ssd_confidence_margin_threshold"],
        "entropy_temperature": case["ssd_entropy_temperature"],
        "tempering": case["ssd_ratio_tempering_factor"],
    }  # fmt: skip
    arguments = _canvas(case)
    if case["algorithm"] == "s2d2_llada21":
        least = case["num_to_transfer"]
        edits = "+edit(tau={editing_threshold}, post_steps={max_post_steps})".format(**case)
        selector = f"threshold(tau={case['threshold']}, n={least})" + edits
    else:
        least = case["block_length"] // case["denoising_steps"]
        ratio = case["ssd_ratio_threshold"]
        options |= {
            "causal": case["cache_ver"], "resample": case["allow_resample"],
            "sure": case["always_check_high_confidence"], "ratio": ratio if ratio >= 0 else None,
            "everywhere": case["ssd_threshold_all_spans"],
        }  # fmt: skip
        selector = f"threshold(tau={case['threshold']}, n={least})"
        if case["remasking_strategy"] == "low_confidence_static":
            selector = f"fixed({least})"
        if case["remasking_strategy"] == "sequential":
            selector = f"sequential(tau={case['threshold']}, n={least}, sure={options['sure']})"
    options["n"] = least
    given = ", ".join(f"{name}={value}" for name, value in options.items())
    return Call(parts(f"{selector}+s2d2({given})"), "block", arguments)


def drawn(case: dict[str, Any]) -> UniformNoise | None:
    """The recorded draws of a case, by position, in place of this library's; None if it has
    none."""
    if case["algorithm"] != "dpad":
        return None
    start, size = len(case["prompt"]), case["block_length"]

    def noise(stream: int, step: int, positions: IntArray) -> FloatArray:
        block = (int(positions[0]) - start) // size - 1
        numbers = np.array(case["draws"][block], np.float32)
        if case["dropout"] == "uniform":  # a permutation: the first so many of it are kept
            numbers = np.argsort(numbers).astype(np.float32) / len(numbers)
        return numbers[positions - (start + (block + 1) * size)]

    return noise


BUILDERS = {
    "llada21_edit": edit, "remdm": remdm, "dpad": dpad,
    "s2d2_llada21": s2d2, "s2d2_sdar": s2d2,
}  # fmt: skip
