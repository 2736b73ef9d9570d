"""Caches for windows of several blocks: what they keep, and when; D2F against a dense mask."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import dllm
from dllm.cache import Plan, Slots
from dllm.cache import compose as compose_cache
from dllm.cache.delayed import DelayedCache
from dllm.core.canvas import Blocks, Canvas

from ..table import EOS, MASK

PROMPT = [5, 9, 17, 40, 3]


def fed(cache: DelayedCache, decided: list[int]) -> list[str]:
    """What each forward computes, "all" or from where, over a prompt of 4 and four blocks of 4:
    ``decided`` says how many blocks are decided before each."""
    canvas = Canvas.for_prompt(np.arange(4), 16, mask_id=MASK, pad_id=EOS)
    canvas.state(Blocks).edges = np.arange(4, 21, 4)
    slots, result = Slots.empty(20), []
    for blocks in decided:
        canvas.masked[4 : 4 + 4 * blocks] = False
        canvas.open_window(4 + 4 * blocks, 20)
        plan = cache.plan(canvas, slots, canvas.masks())
        result.append("all" if plan.refresh else str(int(plan.compute[0])))
        canvas.nfe += 1
    return result


@pytest.mark.parametrize(
    ("cache", "decided", "expected"),
    [
        # d3LLM's code, by hand: the prompt counts as decided since forward 0.
        (DelayedCache(1), [0, 0, 1, 1, 1], ["all", "4", "all", "4", "8"]),
        (DelayedCache(2), [0, 0, 0, 1, 1, 1, 1], ["all", "all", "4", "all", "all", "4", "8"]),
        (DelayedCache(0), [0, 0, 1, 1], ["all", "4", "4", "8"]),
        (DelayedCache(9), [0, 1, 2, 3], ["all"] * 4),
        (DelayedCache(1, refresh_every=2), [0, 0, 0, 1, 1], ["all", "all", "4", "all", "4"]),
        # two blocks at once: together (Dream) or in turn (LLaDA)
        (DelayedCache(1, in_turn=False), [0, 2, 2, 2, 2], ["all", "all", "4", "12", "12"]),
        (DelayedCache(1, in_turn=True), [0, 2, 2, 2, 2], ["all", "all", "4", "8", "12"]),
        (DelayedCache(2, in_turn=True), [0, 0, 2, 2, 2, 2, 2, 2],
         ["all", "all", "all", "all", "4", "all", "8", "12"]),
    ],
)  # fmt: skip
def test_blocks_are_kept_after_their_delay(
    cache: DelayedCache, decided: list[int], expected: list[str]
) -> None:
    assert fed(cache, decided) == expected


def test_families_wait_as_their_code_does() -> None:
    assert [compose_cache("delayed", f).in_turn for f in ("llada", "dream")] == [True, False]


@pytest.mark.parametrize("bad", ["delayed(delay=-1)", "delayed(refresh_every=0)"])
def test_errors_teach(bad: str) -> None:
    with pytest.raises(dllm.ConfigError, match="must"):
        compose_cache(bad)


def test_a_plan_is_cut_at_its_borders() -> None:
    plan = Plan(np.arange(2, 9), np.arange(9), borders=np.array([4, 8]))
    pieces = [(c.tolist(), None if r is None else len(r)) for c, r in plan.pieces(9)]
    assert pieces == [([2, 3], 4), ([4, 5, 6, 7], 8), ([8], 9)]
    assert Plan(np.arange(3)).pieces(9)[0][1] is None
    shifted = Plan(np.arange(4, 9), floor=4)
    assert shifted.rows(np.array([4, 5, 8]), 1).tolist() == [4, 4, 7]


def dense(model: dllm.DiffusionModel, ids: list[int], start: int, block: int) -> torch.Tensor:
    """Logits (N, V) with the prompt as one block, and blocks that see what is left of them."""
    position = np.arange(len(ids))
    number = np.where(position < start, 0, 1 + (position - start) // block)
    seen = torch.from_numpy(number[None, :] <= number[:, None])
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
    with torch.inference_mode():
        logits: torch.Tensor = model.hf(torch.tensor([ids]), attention_mask=mask).logits[0]
    return logits


@pytest.mark.parametrize("shift", [0, 1])
def test_d2f_is_the_dense_block_causal_forward(tiny: dllm.DiffusionModel, shift: int) -> None:
    """Every commit is what a forward over the open blocks with a dense mask says, and no block is
    computed any more once it was fed whole."""
    model = replace(tiny, facts=replace(tiny.facts, logit_shift=shift))
    spec = "d2f(0.3)+staged_blocks(4, block_add_threshold=0.25, decoded_token_threshold=0.75)"
    result = dllm.generate(
        model, PROMPT, sampler=spec, cache="d2f", max_new_tokens=14, eos_policy="none", trace=True,
        suppress_mask=False,
    )  # fmt: skip
    assert result.trace is not None
    ids: list[int] = PROMPT + [model.facts.mask_token_id] * 14  # type: ignore[list-item]
    for step in result.trace.steps:
        logits = dense(model, ids, len(PROMPT), 4)
        for position, token, _ in step.commits:
            row = logits[position - shift].log_softmax(-1)
            assert int(row.argmax()) == token
            ids[position] = token
    assert result.sequences.tolist() == ids
    assert result.computed < result.nfe * len(ids) * 0.7


def test_after_a_stop_no_block_opens() -> None:
    canvas = Canvas.for_prompt(np.arange(4), 12, mask_id=MASK, pad_id=EOS)
    eos = dllm.samplers.compose("d2f+staged_blocks(4)").eos
    canvas.open_window(4, 12)
    canvas.commit(np.array([5]), np.array([EOS]), np.zeros(1, np.float32))
    eos.check(canvas, np.array([5]), (EOS,))
    assert (canvas.end, canvas.finished) == (12, False)
    rest = canvas.masks()
    canvas.commit(rest, np.ones(len(rest), np.int64), np.zeros(len(rest), np.float32))
    eos.check(canvas, rest, (EOS,))
    assert canvas.finish_reason == "stop"
    assert (canvas.stop_position, canvas.length) == (5, 6)


@pytest.mark.parametrize("stop", [3, 17, 40])
def test_branches_that_end_the_text_open_no_block(tiny: dllm.DiffusionModel, stop: int) -> None:
    """With a frequent token as stop id: rows end early, in a batch as alone, and nothing breaks."""
    model = replace(tiny, facts=replace(tiny.facts, stop_token_ids=(stop,), eos_token_id=stop))
    how = {"sampler": "lopa(d2f(0.2), k=4)+staged_blocks(4)", "cache": "d2f", "max_new_tokens": 20}
    prompts = [[5, 9, 17, 40, 3], [7, 8], [stop, 2, 3]]
    together = dllm.generate(model, prompts, **how)  # type: ignore[call-overload]
    for prompt, result in zip(prompts, together, strict=True):
        alone = dllm.generate(model, prompt, **how)  # type: ignore[call-overload]
        assert alone.sequences.tolist() == result.sequences.tolist()
        assert (alone.nfe, alone.computed) == (result.nfe, result.computed)
