"""How a recorded official case is expressed as a call of this library."""

from typing import Any

import numpy as np

from dllm.core.canvas import UniformNoise

from .call import Call
from .quirk_caches import cache_of
from .quirks import parts
from .replay_samplers import SAMPLERS

# Replays decode everything and keep the mask token proposable, as the official loops do.
OFFICIAL = {"eos_policy": "none", "suppress_mask": False}


def call_of(case: dict[str, Any]) -> Call:
    """The call that reproduces ``case``."""
    builder = BUILDERS[case["algorithm"]]
    sampler, cache, arguments = builder(case)
    length = case.get("gen_length") or case["max_new_tokens"]
    return Call(sampler, cache, {"max_new_tokens": length, **OFFICIAL, **arguments})


def _llada(case: dict[str, Any]) -> Call:
    keys = ("block_length", "cfg_scale")
    return Call("llada", "none", {"steps": case["num_steps"]} | {k: case[k] for k in keys})


def _fast_dllm_llada(case: dict[str, Any]) -> Call:
    arguments: dict[str, Any] = {"block_length": case["block_length"]}
    sampler = {
        "fixed": "llada",
        "threshold": "threshold(tau={threshold})",
        "factor": "released_factor(factor={factor})",
    }[case["policy"]]
    if case["policy"] == "fixed":
        arguments["steps"] = case["num_steps"]
    return Call(parts(sampler.format(**case)), case["cache"], arguments)


def _dream(case: dict[str, Any]) -> Call:
    filters = {key: case[key] for key in ("top_p", "top_k") if case.get(key) is not None}
    sampler = "dream(alg={alg}, alg_temp={alg_temp}, eps={eps})".format(**case)
    return Call(sampler, "none", {"steps": case["num_steps"], **filters})


def _fast_dllm_dream(case: dict[str, Any]) -> Call:
    # This code keeps transformers' own default of top_k=50 for its scores.
    filters = {"top_k": 50}
    if case["variant"] == "nocache_threshold":
        sampler = parts("capped_threshold(tau={threshold})".format(**case))
        return Call(sampler, "none", {"steps": case["num_steps"], **filters})
    blocks = "+blocks({block_length})+force_first".format(**case)
    cache = case["variant"].removesuffix("_cache")
    if case["alg"] == "confidence_threshold":
        return Call(parts("threshold(tau={threshold})".format(**case) + blocks), cache, filters)
    arguments = {"steps": case["num_steps"], **filters}
    return Call(parts("dream(alg=entropy)+awake" + blocks), cache, arguments)


def _dparallel(case: dict[str, Any]) -> Call:
    sampler = "dparallel(tau={threshold})".format(**case)
    return Call(sampler, case.get("cache", "none"), {"block_length": case["block_length"]})


def _adablock(case: dict[str, Any]) -> Call:
    delimiters = case.get("delimiter_ids", [198])  # the Dream code has a fixed list
    sampler = (
        f"threshold(tau={case['threshold']})+adablock(block_length={case['init_block_length']}, "
        f"delimiters={tuple(delimiters)}, delimiter_threshold={case['delimiter_threshold']}"
    )
    # The cached Dream code cannot predict a block's first position later on.
    forced = case["algorithm"] == "adablock_dream" and case["cache"] != "none"
    filters = {"top_k": 50} if case["algorithm"] == "adablock_dream" else {}  # that default, too
    return Call(parts(sampler + (")+force_first" if forced else ")")), case["cache"], filters)


def _prophet(case: dict[str, Any]) -> Call:
    arguments = {"block_length": case["block_length"], "steps": case["num_steps"]}
    gaps = ", ".join(f"{name}={gap}" for name, gap in case["early_exit_thresholds"].items())
    start = case["answer_start_pos"] - len(case["prompt"])
    sampler = f"prophet({gaps}, answer={case['answer_length']}, start={start})"
    constraints = {int(k): v for k, v in (case["constraints"] or {}).items()}
    return Call(sampler, "none", {**arguments, "constraints": constraints})


def _r2(case: dict[str, Any]) -> Call:
    rules = dict.fromkeys(
        ("confidence_cluster_size", "confidence_cluster_unmasked", "token_cluster",
         "temporal_steps")
    )  # fmt: skip
    rules |= case["r2"]
    base = "released_factor(factor={factor})" if case["policy"] == "factor" else (
        "threshold(tau={threshold})"
    )  # fmt: skip
    sampler = base.format(**case) + f"+r2({', '.join(f'{k}={v!r}' for k, v in rules.items())})"
    return Call(parts(sampler), "dual", {"block_length": case["block_length"]})


def _dinfer(case: dict[str, Any]) -> Call:
    given = case["decoder_args"]
    sampler = {
        "threshold": "threshold(tau={threshold})",
        "hierarchy": "hierarchical(threshold={threshold}, low_threshold={low_threshold})",
        "credit": "threshold(tau={threshold})+credit(credit_alpha={credit_alpha}, "
        "boost_gamma={boost_gamma}, decay_beta={decay_beta})",
    }[case["decoder"]].format(**given)
    policy = "block_contains" if case["early_stop"] else "none"
    arguments = {"block_length": case["block_length"], "eos_policy": policy}
    return Call(sampler, "none", arguments)


def _d3llm(case: dict[str, Any]) -> Call:
    sampler = (
        "d3llm(tau={threshold})+staged_blocks({block_size}, "
        "block_add_threshold={block_add_threshold}, "
        "decoded_token_threshold={decoded_token_threshold})"
    )
    cached = case.get("function", "").endswith("kv_cache")
    if not cached and case.get("cache_delay_iter", 10_000) >= 10_000:
        return Call(sampler.format(**case), "none", {})
    every = case["refresh_interval"] if case["refresh_interval"] < 10_000 else None
    cache = f"released_delayed(delay={case['cache_delay_iter']}, refresh_every={every})"
    return Call(sampler.format(**case), cache_of(cache), {})


def _dkv_dream(case: dict[str, Any]) -> Call:
    names = {"decoded": "shifted_dkv", "pd": "shifted_dkv_pd", "prefill": "dkv_prefill"}
    cache = names[case["cache_type"]]
    if cache != "dkv_prefill":
        cache += f"(refresh_every={case['cache_steps']}, both={case['shift_type'] == 'un_right'})"
    # This code, too, keeps transformers' default of top_k=50.
    return _dream({**case, "top_k": 50})._replace(cache=cache_of(cache))


def _dkv_llada(case: dict[str, Any]) -> Call:
    cache = cache_of("released_dkv(refresh_every={cache_reloading_step})".format(**case))
    arguments = {"steps": case["num_steps"], "block_length": case["block_length"]}
    return Call("llada", cache, arguments)


def _dkv_greedy(case: dict[str, Any]) -> Call:
    cache = "dkv_greedy(refresh_every={cache_reloading_step}, window={window_size})".format(**case)
    arguments = {"steps": case["num_steps"], "block_length": case["block_length"]}
    return Call("llada(remasking=random)", cache, arguments)


def drawn(case: dict[str, Any]) -> UniformNoise | None:
    """Numbers that give the order of a recorded run whose own are not at hand."""
    if case["algorithm"] != "dkv_cache_llada_greedy":
        return None
    numbers = np.zeros(len(case["final"]), np.float32)
    for i, step in enumerate(case["steps"]):
        for position, _ in step:
            numbers[position] = 1 - (i + 1) / (len(case["steps"]) + 1)
    return lambda stream, step, positions: numbers[positions]


def _window_llada(case: dict[str, Any]) -> Call:
    cache = (
        "released_window_diffusion(refresh_every={refresh_cycle}, active={active_tokens}, "
        "window={window_tokens})"
    ).format(**case)
    return Call(
        "llada", cache_of(cache), {"steps": case["num_steps"], "block_length": case["gen_length"]}
    )


def _window_dream(case: dict[str, Any]) -> Call:
    cache = (
        "released_window_dream(refresh_every={refresh_cycle}, active={i_win_size}, "
        "window={o_win_size}, sliding={slide_window})"
    ).format(**case)
    sampler = "dream(eps={eps})+awake({refresh_cycle})+whole+force_first({refresh_cycle})".format(
        **case
    )
    arguments = {"steps": case["num_steps"], "top_k": 50}
    return Call(parts(sampler), cache_of(cache), arguments)


def _dllm_cache(case: dict[str, Any]) -> Call:
    cache = (
        "dllm_cache(prompt_every={prompt_interval_steps}, response_every={gen_interval_steps}, "
        "ratio={transfer_ratio}, force_pending=False)"
    )
    return _llada(case)._replace(cache=cache.format(**case))


BUILDERS = {
    "llada_generate": _llada,
    "fastdllm_llada": _fast_dllm_llada,
    "dream_diffusion_generate": _dream,
    "fastdllm_dream": _fast_dllm_dream,
    "dparallel_llada": _dparallel,
    "dparallel_dream": _dparallel,
    "adablock_llada": _adablock,
    "adablock_dream": _adablock,
    "prophet_earlyexit": _prophet,
    "r2_dllm_llada_dual": _r2,
    "dinfer_blockwise": _dinfer,
    "d3llm_multi_block_llada": _d3llm,
    "d3llm_multi_block_dream": _d3llm,
    "dkv_cache_dream": _dkv_dream,
    "dkv_cache_llada_decode": _dkv_llada,
    "dkv_cache_llada_greedy": _dkv_greedy,
    "dllm_cache_llada": _dllm_cache,
    "window_diffusion_llada": _window_llada,
    "window_diffusion_dream": _window_dream,
    **SAMPLERS,
}
