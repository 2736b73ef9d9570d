"""The calls that reproduce what was recorded of DCD and DSB."""

from collections.abc import Callable
from typing import Any

from .quirk_caches import cache_of
from .quirks import parts

Pairs = list[list[tuple[int, int]]]
Built = tuple[Any, Any, dict[str, Any]]


def dcd(case: dict[str, Any]) -> Built:
    selector = {
        "threshold": "threshold(tau={0})",
        "fixed": "fixed(n={0})",
        "entropy_threshold": "dparallel(tau={1}, inclusive=True)",
    }[case["decode_algo"]].format(case["decode_param"], -case["decode_param"])
    mode, _, delay = case["cache_type"].partition("-delay")
    arguments: dict[str, Any] = {"suppress_mask": True}
    cache = mode if mode == "none" else cache_of(
        f"released_dcd(refresh_after={case['refresh_count']}, mode={mode}, delay={delay or 0}, "
        f"lookahead={bool(case.get('lookahead', True))})"
    )  # fmt: skip
    if case["window_type"] == "static":
        arguments |= {"block_length": case["block_size"], "eos_policy": "block_contains"}
        return selector, cache, arguments
    window = "dcd(s_init={initial_window_length}, s_max={max_window_length})".format(**case)
    return f"{selector}+{window}", cache, arguments | {"eos_policy": "first_commit"}


def left_of_padding(case: dict[str, Any], steps: Pairs) -> Pairs:
    """Commits without what padding has overwritten in the same step.

    The recordings show the canvas after a step, in which everything behind a new end of text is
    padding: at once in a sliding window, when the block is complete in a static one.
    """
    result, stop = [], len(case["final"])
    for step in steps:
        stop = min([stop, *(p for p, token in step if token == case["eos_id"])])
        result.append([(p, token) for p, token in step if p <= stop])
    if case["window_type"] == "sliding":
        return result
    return [*steps[:-1], result[-1]]


def dsb(case: dict[str, Any]) -> Built:
    selector = {
        "threshold": "threshold(tau={threshold})",
        "factor": "released_factor(factor={factor})",
        "fixed": "fixed(n={quota})",
    }[case["policy"]].format(quota=case["gen_length"] // case["num_steps"], **case)
    width = case["max_block_length"] if case["max_block_length"] > 0 else None
    if case["cache"] == "none":
        return parts(f"{selector}+dsb({case['block_length']}, k_max={width})"), "none", {}
    window = (
        "released_dsb({block_length}, {width}, before={prefix_window}, after={after})"
    ).format(width=width, after=case.get("suffix_window", 0), **case)
    return parts(f"{selector}+{window}"), cache_of("released_dsb"), {}


BUILDERS: dict[str, Callable[[dict[str, Any]], Built]] = {
    f"{name}_{family}": builder
    for name, builder in {"dcd": dcd, "dsb": dsb}.items()
    for family in ("llada", "dream")
}
