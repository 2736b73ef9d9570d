"""What LLaDA2.1's editing replaces, and when it lets a block go."""

from typing import Any

import numpy as np
import pytest

import dllm
from dllm.core.canvas import Canvas
from dllm.samplers import Decision, Prediction, Sampler, Seen, compose
from dllm.samplers.edit import Edits

from ..table import MASK, table_model, with_probabilities
from .test_vectors import canvas_of

PRESENT = 7  # the token that stands at decided positions


def started(spec: str, decided: int, masks: int, **options: Any) -> tuple[Canvas, Sampler]:
    """A block whose first ``decided`` positions were decided by an earlier forward."""
    canvas, sampler = canvas_of(decided + masks), compose(spec, **options)
    sampler.prepare(canvas)
    at = np.arange(decided)
    canvas.commit(at, np.full(decided, PRESENT), np.log(np.full(decided, 0.8, np.float32)))
    canvas.step, canvas.revising = 1, True
    return canvas, sampler


def step(
    canvas: Canvas, sampler: Sampler, tokens: list[int], probabilities: list[float]
) -> Decision:
    """One step in which the model proposes ``tokens``."""
    assert sampler.prepare(canvas)
    at, _ = sampler.reads(canvas)
    assert len(at) == len(tokens)
    logprob = np.log(np.array(probabilities, np.float32))
    prediction = Prediction(at, np.array(tokens), logprob)
    decision = sampler.decide(canvas, sampler.feeds(canvas), [Seen(canvas, prediction)])
    canvas.step += 1
    return decision


def test_tokens_that_the_model_no_longer_chooses_are_replaced() -> None:
    canvas, sampler = started("edit(tau=0.5)", 3, 3)
    decision = step(canvas, sampler, [9, 9, 7, 5, 5, 5], [0.9, 0.4, 0.9, 0.8, 0.2, 0.3])
    # 0: another one, sure; 1: not sure; 2: the same; 3: a sure mask; what a forward has just
    # decided is not edited by the same forward.
    assert sorted(zip(decision.committed.tolist(), decision.tokens.tolist(), strict=True)) == [
        (0, 9), (3, 5),
    ]  # fmt: skip
    assert canvas.tokens.tolist() == [9, 7, 7, 5, MASK, MASK]
    assert canvas.revising


def score(probability: float) -> float:
    """What a sampler makes of its logarithm, in float32."""
    return float(np.exp(np.log(np.float32(probability))))


def test_another_choice_exceeds_the_threshold() -> None:
    canvas, sampler = started(f"edit(tau={score(0.6)})", 2, 1)
    step(canvas, sampler, [9, 9, 5], [0.6, 0.61, 0.1])
    assert canvas.tokens[:2].tolist() == [PRESENT, 9]


@pytest.mark.parametrize(("post_steps", "looks"), [(0, 0), (1, 1), (3, 3), (16, 4)])
def test_a_decided_block_is_looked_at_until_nothing_changes(post_steps: int, looks: int) -> None:
    canvas, sampler = started(f"edit(tau=0.5, post_steps={post_steps})", 1, 1)
    step(canvas, sampler, [7, 5], [0.9, 0.9])
    choices = [[9, 5], [9, 6], [7, 6], [7, 6], [1, 1]]  # the fourth look changes nothing
    done = 0
    while canvas.revising:
        step(canvas, sampler, choices[done], [0.9, 0.9])
        done += 1
    assert done == looks


def test_a_text_is_mended_before_it_is_final() -> None:
    """A model that first writes 5 everywhere, and from then on wants 6 behind every 5."""

    def table(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        clean = ids != MASK
        rows = [with_probabilities(6 if clean[i] and i % 2 else 5, 0.9) for i in range(len(ids))]
        return np.array(rows)

    model = table_model(table)
    events = list(dllm.stream(model, [1, 2], sampler="edit", cache="none", max_new_tokens=8,
                              block_length=4))  # fmt: skip
    result = events[-1].result
    assert result is not None
    assert result.tokens == [5, 6] * 4
    seen = [token for event in events for token in event.tokens]
    assert seen == result.tokens  # nothing that was streamed changed afterwards
    assert result.nfe == 6  # per block: write, mend, find nothing more


def test_forgets_from_block_to_block() -> None:
    canvas, sampler = started("edit", 2, 0)
    canvas.state(Edits).post = 5
    sampler.parts[-1].begin_block(canvas)
    assert canvas.state(Edits).post == 0


def test_a_block_that_never_settles_ends() -> None:
    """DMax looks no more often than a text has positions, and editing 1000 times at most."""
    canvas, sampler = canvas_of(4), compose(f"dmax(block={10**20})")
    sampler.prepare(canvas)
    at, half = np.arange(4), np.log(np.full(4, 0.5, np.float32))
    for token in range(4):
        tokens = np.full(4, token)
        top = {"top_token": tokens[:, None], "top_logprob": half[:, None]}
        seen = Seen(canvas, Prediction(at, tokens, half, **top))
        sampler.decide(canvas, sampler.feeds(canvas), [seen])
        assert canvas.revising == (token < 3)
        canvas.block_step += 1
    with pytest.raises(dllm.ConfigError, match="post_steps must lie between 0 and 1000 forwards"):
        compose(f"edit(post_steps={10**20})")
