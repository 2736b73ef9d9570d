"""Recorded runs of diffusers' LLaDA2Pipeline, this library's nearest relative.

Its loop is that of a batch: a block is left by all rows at once, and as long as one has masks all
are decided by the schedule.  That loop stands here, around a sampler's turns.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dllm import samplers
from dllm.cache import compose as compose_cache
from dllm.core.canvas import PROPOSAL, PURPOSES, Canvas
from dllm.core.config import GenerationConfig
from dllm.engine import Engine
from dllm.engine.recipe import MaskedRecipe
from dllm.engine.visibility import Piece, Visibility
from dllm.samplers import Window
from dllm.samplers.base import Reads, even_share, top
from dllm.samplers.turn import Reviser, Turn

from ..thin import some
from .test_uniform import cases

Case = dict[str, Any]


class Loop:
    """What the rows of a case have in common: the open block, and how far its schedule is."""

    def __init__(self, case: Case, length: int) -> None:
        self.case, self.size, self.length = case, case["block_length"], length
        self.steps = min(case["num_inference_steps"], case["gen_length"] // case["minimal_topk"])
        self.quota = [even_share(self.size, self.steps, k) for k in range(self.steps)]
        self.block, self.masked, self.edited = (0, 0), False, False
        self.taken = self.post = self.forward = 0
        self.ended = set[int]()  # canvases that are not touched any more

    def open(self, low: int) -> None:
        self.block = low, min(low + self.size, self.length)
        self.taken = self.post = 0


class Cut(Visibility):
    """Positions from ``limit`` on fill the last block: decided, and seen by themselves alone."""

    def __init__(self, limit: int, block_length: int) -> None:
        super().__init__(block_length)
        object.__setattr__(self, "limit", limit)

    def pieces(self, compute: Any, read: Any, at: int, base: int, *rest: Any, **how: Any) -> Any:
        limit: int = self.limit  # type: ignore[attr-defined]
        inside = compute[compute < limit]
        yield from super().pieces(inside, np.arange(limit), at, base, *rest, **how)
        for place in compute[compute >= limit]:
            keys = np.append(np.arange(limit), place) + base
            yield Piece(at + int(place - compute[0]), 1, keys)


class Block(Window):
    name = "block of the loop"
    offers = samplers.SAMPLERS["blocks"].offers

    def __init__(self, loop: Loop) -> None:
        object.__setattr__(self, "loop", loop)

    def advance(self, canvas: Canvas) -> None:
        low, high = self.loop.block  # type: ignore[attr-defined]
        if canvas.window != (max(low, canvas.start), high):
            canvas.open_window(max(low, canvas.start), high)


class Refinement(Reviser):
    name = "refinement"

    def __init__(self, loop: Loop) -> None:
        object.__setattr__(self, "loop", loop)

    def reads(self, canvas: Canvas) -> Reads:
        return Reads(np.arange(*canvas.window))

    def decide(self, turn: Turn) -> None:
        loop: Loop = self.loop  # type: ignore[attr-defined]
        canvas, case, score = turn.canvas, loop.case, turn.view.score
        p = turn.view.all_predictions
        old = p.take(~canvas.masked[p.positions])
        sure = score > case["threshold"]
        quota = loop.quota[min(loop.taken, loop.steps - 1)]
        enough = np.count_nonzero(sure) >= quota
        over, bar = id(canvas) in loop.ended, case["editing_threshold"]
        turn.choose_these((sure if enough or not len(score) else top(score, quota)) & (not over))
        turn.commit()
        if not over and bar is not None and bar > 0:
            differs = (old.token != canvas.tokens[old.positions]) & (np.exp(old.logprob) > bar)
            old = old.take(differs)
            turn.rewrite(old.positions, old.token, old.logprob)
            loop.edited |= bool(len(old.positions))
        turn.open = True
        turn.go_on()


def decode(case: Case, rows: list[int]) -> None:
    from .together import model_of

    model = model_of(case["model"], case["eos_id"], case["block_length"])
    valid = case.get("attention_mask")
    prompts = [
        np.array([t for i, t in enumerate(case["prompt"][row]) if not valid or valid[row][i]])
        for row in rows
    ]
    limit = len(prompts[0]) + case["gen_length"]
    loop = Loop(case, -(-limit // case["block_length"]) * case["block_length"])
    draws = case["temperature"] and case["sampling_method"] != "greedy"
    filters: Any = {"temperature": case["temperature"]} if draws else {}
    filters |= {k: case[k] for k in ("top_p", "top_k") if draws and case[k] is not None}
    composed = samplers.compose([Refinement(loop), Block(loop)], options={"eos_policy": "none"})
    recipe = MaskedRecipe(composed, config=GenerationConfig(suppress_mask=False, **filters))
    engine, canvases = Engine(model, compose_cache("none")), []
    engine.forward.visibility = Cut(limit, case["block_length"])

    def noise(row: int) -> Any:
        def drawn(stream: int, step: int, positions: Any) -> Any:
            assert stream % PURPOSES == PROPOSAL
            low = loop.block[0]
            return np.array(case["steps"][loop.forward]["u"][row], np.float32)[positions - low]

        return drawn

    for row, prompt in zip(rows, prompts, strict=True):
        canvas = Canvas.for_prompt(
            prompt, loop.length - len(prompt), mask_id=case["mask_id"], pad_id=0, noise=noise(row)
        )
        canvases.append(canvas)
        admitted = engine.admit(canvas, recipe)
        assert admitted is not None
        admitted.options = replace(admitted.options, inverse=True)
    low = len(prompts[0]) // loop.size * loop.size
    while low < loop.length and loop.forward < len(case["steps"]):
        loop.open(low)
        for canvas in canvases:
            canvas.revising = False
        while True:
            inner = slice(*loop.block)
            loop.masked = any(canvas.masked[inner].any() for canvas in canvases)
            loop.edited = False
            if loop.taken >= loop.steps:  # masks may be left
                break
            if loop.post > case["max_post_steps"]:
                break
            loop.post += not loop.masked
            before = [canvas.tokens.copy() for canvas in canvases]
            for canvas in canvases:  # all are read once more, those without a mask as well
                canvas.revising = canvas.window[1] == loop.block[1]
            steps = {id(step.canvas): step for step in engine.step()}
            assert len(steps) == len(canvases)
            recorded = case["steps"][loop.forward]["changed"]
            changed = [
                [row, int(at), int(canvas.tokens[at])]
                for row, canvas, old in zip(rows, canvases, before, strict=True)
                for at in np.flatnonzero(canvas.tokens != old)
            ]
            assert changed == [one for one in recorded if one[0] in rows], loop.forward
            loop.forward += 1
            had, loop.taken = loop.masked, loop.taken + loop.masked
            for row, canvas in zip(rows, canvases, strict=True):
                new = [at for r, at, token in recorded if r == row and token == case["eos_id"]]
                first = np.flatnonzero(canvas.tokens[canvas.start :] == case["eos_id"])
                if case["eos_early_stop"] and new and len(first):
                    end = canvas.start + int(first[0])
                    if not canvas.masked[canvas.start : end].any():
                        loop.ended.add(id(canvas))
            if len(loop.ended) == len(rows):
                loop.length = 0
                break
            if not had and not loop.edited:
                break
        low += loop.size
    assert loop.forward == case["nfe"]


CASES = cases("llada2_pipeline")
PARTS = frozenset({"block"})  # the rest is the pipeline's own, and stands here


@pytest.mark.parametrize("case", some(CASES, 4))
def test_pipeline(case: Case) -> None:
    decode(case, [*range(len(case["prompt"]))])
