"""The calls that reproduce what was recorded of DCD, DSB, d2Cache and DAWN."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dllm.cache import Plan, Slots
from dllm.cache.base import Layer
from dllm.cache.d2 import D2Cache
from dllm.cache.dsb import DSBCache
from dllm.canvas import BoolArray, Canvas, FloatArray, IntArray
from dllm.samplers import compose
from dllm.samplers.base import Prediction, View
from dllm.samplers.certainty_prior import CertaintyPrior
from dllm.samplers.dcd import slide
from dllm.samplers.dsb import DSB
from dllm.samplers.scorers import Probability

from .conftest import goldens_dir

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
    cache = mode if mode == "none" else (
        f"dcd(refresh_after={case['refresh_count']}, mode={mode}, delay={delay or 0}, "
        f"official=True, lookahead={bool(case.get('lookahead', True))})"
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


@dataclass
class Interval:
    """When the released DSB code recomputed everything last: the masks left then, None before the
    first time; whether this is such a step; where the window began in the step before; the end of
    what is fed, and how far it lies right of the window."""

    masks: int | None = None
    refresh: bool = False
    low: int | None = None
    end: int = 0
    suffix: int = 0


@dataclass(frozen=True)
class ReleasedDSB(DSB):
    """DSB's window as its released code has it beside its cache.

    A step that recomputes everything commits exactly the first mask on Dream.  In the others masks
    of the suffix compete, too: they are left out by their place in the canvas, but in an array
    that begins where the fed slice begins.
    """

    force_first: bool = False
    prefix: int = 0
    suffix: int = 0

    def advance(self, canvas: Canvas) -> None:
        super().advance(canvas)
        (low, high), interval = canvas.window, canvas.state(Interval)
        masks = int(canvas.masked.sum())
        interval.refresh = interval.masks is None or interval.masks - masks >= self.block_length
        if interval.masks is None:
            interval.suffix = self.suffix
        interval.masks = masks if interval.refresh else interval.masks
        moved = 0 if interval.low is None else low - interval.low
        interval.low = low
        interval.suffix = min(interval.suffix, canvas.end - high)
        interval.end = high + interval.suffix
        if not interval.refresh:
            first = low - min(max(moved, self.prefix), low)
            slide(canvas, low, min(interval.end, first + high))

    def decides(self, canvas: Canvas) -> bool:
        return self.force_first and canvas.state(Interval).refresh

    def select(self, view: View) -> BoolArray:
        first: BoolArray = np.arange(len(view.positions)) == 0
        return first


@dataclass(frozen=True)
class SecondOfEquals(Probability):
    """The first two positions of a fed slice are predicted from the same row; where they are the
    best, the official top-k of one takes the second."""

    def score(self, canvas: Canvas, prediction: Prediction) -> FloatArray:
        score = super().score(canvas, prediction)
        if len(score) > 1 and score[0] == score[1]:
            score[0] = np.nextafter(score[0], np.float32(0))
        return score


@dataclass(frozen=True)
class ReleasedDSBCache(DSBCache):
    """Feeds the suffix whether it competes or not.  Where logits are shifted, that is done inside
    the slice that is fed, whose first position is predicted from its own row."""

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        plan = super().plan(canvas, slots, targets)
        if plan.refresh:
            return plan
        first = int(plan.compute[0])
        return Plan(np.arange(first, canvas.state(Interval).end), floor=first)


def dsb(case: dict[str, Any]) -> Built:
    selector = {
        "threshold": "threshold(tau={threshold})",
        "factor": "factor(factor={factor}, official=True)",
        "fixed": "fixed(n={quota})",
    }[case["policy"]].format(quota=case["gen_length"] // case["num_steps"], **case)
    width = case["max_block_length"] if case["max_block_length"] > 0 else None
    if case["cache"] == "none":
        return f"{selector}+dsb({case['block_length']}, k_max={width})", "none", {}
    before, after = case["prefix_window"], case.get("suffix_window", 0)
    window = ReleasedDSB(
        case["block_length"], width, force_first=case["algorithm"] == "dsb_dream",
        prefix=before, suffix=after,
    )  # fmt: skip
    cache = ReleasedDSBCache(refresh_after=case["block_length"], before=before)
    return [*compose(selector).selectors, SecondOfEquals(), window], cache, {}


@dataclass(frozen=True)
class WatchedD2(D2Cache):
    """Remembers which positions reached the first layer."""

    fed: list[list[int]] = field(default_factory=list)

    def after_attention(self, canvas: Canvas, slots: Slots, layer: Layer) -> None:
        super().after_attention(canvas, slots, layer)
        if layer.index == 0:
            self.fed.append(layer.stream.tolist())


def d2(case: dict[str, Any]) -> Built:
    selector = "fixed" if case["threshold"] is None else f"threshold(tau={case['threshold']})"
    parts = compose(selector).selectors
    if case["sigma"]:
        parts += (CertaintyPrior(sigma=case["sigma"]),)
    cache = WatchedD2(
        k=case["current_k"], p=case["rollout_p"], sigma=case["cache_sigma"],
        inflate=case["inflate_w"], official=True,
    )  # fmt: skip
    return parts, cache, {"block_length": case["block_length"]}


def dawn(case: dict[str, Any]) -> Built:
    model = json.loads((goldens_dir() / case["model"] / "config.json").read_text())
    count = model.get("n_layers") or model["num_hidden_layers"]
    sampler = (
        "dawn(0.9, {tau_sink}, {tau_edge}, {tau_induce}, {tau_low}, layers={layers}, official=True)"
    ).format(layers=count - case["attention_from_layer"], **case)
    return sampler, "none", {"block_length": case["block_length"]}


BUILDERS: dict[str, Callable[[dict[str, Any]], Built]] = {
    f"{name}_{family}": builder
    for name, builder in {"d2cache": d2, "dawn": dawn, "dcd": dcd, "dsb": dsb}.items()
    for family in ("llada", "dream")
}
