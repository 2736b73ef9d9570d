"""How recorded cases of methods published in 2026 are expressed as calls."""

from __future__ import annotations

from typing import Any

from .call import Call


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


def t2m(case: dict[str, Any]) -> Call:
    sampler = (
        "+edit(tau={remask_threshold}, mode={remask_strategy}, post_steps={max_post_steps}, "
        "per_position={max_remask_per_pos}, share={max_remask_ratio})"
    ).format(**case)
    return Call(_draft(case) + sampler, "block(official=True)", _canvas(case))


BUILDERS = {"llada21_edit": edit, "t2m_remask": t2m}
FILES = ("llada21_edit", "t2m_remask_llada2")
