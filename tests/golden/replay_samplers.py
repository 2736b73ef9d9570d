"""How recorded cases of samplers beyond the first collection are expressed as calls."""

from typing import Any

from .call import Call
from .quirks import parts


def _localleap(case: dict[str, Any]) -> Call:
    sampler = "localleap(kappa={threshold}, tau_r={relaxed_threshold}, w={radius})"
    # The code for Dream keeps transformers' own default of top_k=50 for its scores.
    filters = {"top_k": 50} if case["algorithm"] == "localleap_dream" else {}
    return Call(sampler.format(**case), "none", {"block_length": case["block_length"], **filters})


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
    "freedave_llada": _freedave,
    "freedave_dream": _freedave,
}
