"""Recorded runs of LoPA on D2F: the same branches in every round, fed the same, the same winner.

The official code feeds branch after branch, the row as it stands last; here they share a forward
and the row comes first.  Where logits are shifted, this library computes the row left of the open
blocks again; the official code keeps its logits from when the block before was kept, which is the
same where attention is block-causal.  Where it is not, `ReleasedLoPA` replays it.
"""

from typing import Any

import numpy as np
import pytest

from dllm.cache import compose as compose_cache
from dllm.core.canvas import Canvas
from dllm.core.config import GenerationConfig
from dllm.engine import Engine, MaskedRecipe
from dllm.samplers import compose

from .quirk_caches import cache_of
from .quirks import parts
from .recorded import recorded
from .together import model_of

MASK = 255
CASES = recorded("lopa_dream")


def lopa(case: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Sampler and cache; no more arguments."""
    full = case["use_full_attention"]
    k, competes = case["branching_factor"], True  # the row as it stands is not counted
    if not case["branch_verification_mode"]:
        competes = k == 1
    elif k > 1:
        k = k + 1 if case["base_branch_competition"] else 1
    spec = (
        f"{'released_' * full}lopa(d2f(tau={case['skip_threshold']}), k={k}, "
        f"base_competes={competes}, "
        f"alpha={case['selection_conf_alpha']}, branch_topp={case['branch_topp']}, "
        f"confidence={'prob' if case['sampling_strategy'] == 'default' else 'neg_entropy'})"
        f"+staged_blocks({case['block_size']}, "
        f"block_add_threshold={case['block_add_threshold']}, "
        f"decoded_token_threshold={case['decoded_token_threshold']})"
    )
    if case["sampling_strategy"] == "neg_entropy":
        spec += "+neg_entropy"
    return parts(spec), cache_of("released_d2f(causal=False)" if full else "d2f"), {}


BUILDERS = {"lopa_dream": lopa}


def official(case: dict[str, Any]) -> list[list[tuple[list[int], int]]]:
    """The canvases of the branches of each round and the positions they were fed."""
    canvas = [*case["prompt"], *[MASK] * case["gen_length"]]
    rounds: dict[int, list[tuple[list[int], int]]] = {}
    forwards = zip(case["extra"]["round_of_forward"], case["n_query"], case["steps"], strict=True)
    for number, fed, step in forwards:
        rounds.setdefault(number, []).append((canvas, fed))
        canvas = [*canvas]
        for position, token in step:
            canvas[position] = token
    assert canvas == case["final"]
    return list(rounds.values())


def _left_of_a_block(case: dict[str, Any], position: int) -> bool:
    """Whether what is computed begins with the row left of a block."""
    offset = position - len(case["prompt"])
    return offset % case["block_size"] == case["block_size"] - 1 if position else False


@pytest.mark.parametrize("case", CASES)
def test_recorded_branches_are_reproduced(case: dict[str, Any]) -> None:
    sampler, cache, _ = lopa(case)
    recipe = MaskedRecipe(
        compose(sampler, stop_ids=(case["eos_id"],), family="dream"),
        config=GenerationConfig(suppress_mask=False, max_new_tokens=case["gen_length"]),
    )
    engine = Engine(model_of(case["model"], case["eos_id"]), compose_cache(cache))
    canvas = Canvas.for_prompt(
        np.array(case["prompt"]), case["gen_length"], mask_id=MASK, pad_id=case["eos_id"]
    )
    row = engine.admit(canvas, recipe, held=True)
    assert row is not None
    expected = official(case)
    for i, branches in enumerate(expected):
        assert engine.plan() == [row], i
        competes = case["branch_verification_mode"] or case["branching_factor"] == 1
        jobs = [*row.jobs[1:], row.jobs[0]] if competes else row.jobs
        if len(jobs) == 1:  # with nothing to try the official code feeds the row twice
            branches = branches[-1:]
        fed_with = [job.canvas.tokens.tolist() for job in jobs]
        assert fed_with == [tokens for tokens, _ in branches], i
        fed = [job.size for job in jobs]
        if not case["use_full_attention"]:  # without the row left of the open blocks
            left = [_left_of_a_block(case, int(job.plan.compute[0])) for job in jobs]
            fed = [n - one for n, one in zip(fed, left, strict=True)]
        assert fed == [n for _, n in branches], i
        engine.step()
    assert row.canvas.finished
    assert row.canvas.tokens.tolist() == case["final"]
