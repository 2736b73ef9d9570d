"""How recorded cases of samplers beyond the first collection are expressed as calls."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .call import Call
from .quirks import parts


def _localleap(case: dict[str, Any]) -> Call:
    sampler = "localleap(kappa={threshold}, tau_r={relaxed_threshold}, w={radius})"
    return Call(sampler.format(**case), "none", {"block_length": case["block_length"]})


def _wino(case: dict[str, Any]) -> Call:
    sampler = "wino(tau2={threshold_back})+wino_draft(tau1={threshold})"
    return Call(sampler.format(**case), "none", {"block_length": case["block_length"]})


@cache
def _filters() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _learn2pd(case: dict[str, Any]) -> Call:
    path = Path(_filters().name) / f"{case['id']}.npz"
    np.savez(path, **{name: np.array(w, np.float32) for name, w in case["filter"].items()})
    sampler = f"learn2pd(theta={case['accept_thres']}, filter='{path}')"
    return Call(sampler, "none", {"block_length": case["block_length"]})


def _sparse_dllm(case: dict[str, Any]) -> Call:
    cache = "sparse(retain={keep_ratio}, kernel={kernel_size})".format(**case)
    arguments = {"steps": case["num_steps"], "block_length": case["block_length"]}
    return Call("llada", cache, arguments)


def _klass(case: dict[str, Any]) -> Call:
    sampler = (
        "{name}(tau={conf_threshold}, kappa={kl_threshold}, history={kl_history_length}, "
        "unmask_strategy={unmask_strategy}"
    )
    if case["algorithm"] == "klass_dream":  # no blocks, one position where nothing is ready
        return Call(sampler.format(name="klass", **case) + ", top_k=50)", "none", {})
    arguments = {"steps": case["num_steps"], "block_length": case["block_length"]}
    return Call(parts(sampler.format(name="released_klass", **case) + ")"), "none", arguments)


def _freedave(case: dict[str, Any]) -> Call:
    base = case["confidence_threshold"]
    inner = "fixed" if base is None else f"threshold(tau={base}), partial=True"
    sampler = f"freedave({inner}, draft_depth={case['draft_steps']})"
    if case["algorithm"] == "freedave_dream":
        sampler += "+force_first"
    return Call(parts(sampler), case["cache"], {"block_length": case["block_length"]})


SAMPLERS = {
    "localleap_llada": _localleap,
    "localleap_dream": _localleap,
    "wino_llada": _wino,
    "learn2pd_llada": _learn2pd,
    "sparse_dllm_llada": _sparse_dllm,
    "klass_llada": _klass,
    "klass_dream": _klass,
    "freedave_llada": _freedave,
    "freedave_dream": _freedave,
}
