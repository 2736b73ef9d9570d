"""What LLaDA2.1's editing and T2M remasking replace, take back, and when they let a block go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dllm
from dllm.core.canvas import Canvas
from dllm.core.errors import ConfigError
from dllm.samplers import Decision, Prediction, Sampler, Seen, compose
from dllm.samplers.edit import Edits

from ..table import EOS, MASK, table_model, with_probabilities
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
    canvas: Canvas, sampler: Sampler, tokens: list[int], probabilities: list[float],
    own: list[float] | None = None,
) -> Decision:  # fmt: skip
    """One step in which the model proposes ``tokens``; ``own``: of the tokens that stand there."""
    assert sampler.prepare(canvas)
    at, _ = sampler.reads(canvas)
    assert len(at) == len(tokens)
    asked = {} if own is None else {"edit": np.log(np.array(own, np.float32))[:, None]}
    logprob = np.log(np.array(probabilities, np.float32))
    prediction = Prediction(at, np.array(tokens), logprob, asked=asked)
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


@pytest.mark.parametrize(
    ("spec", "own", "taken"),
    [
        (f"edit(mode=low_prob, tau={score(0.2)}, share=1)", [0.05, 0.2, 0.19, 0.5], [0, 2]),
        (f"edit(mode=t2t_remask, tau={score(0.91)}, share=1)", [0.05, 0.2, 0.04, 0.5], [3]),
        ("edit(mode=low_prob, share=1)", [0.05, 0.2, 0.09, 0.5], [0, 2]),
        ("edit(mode=low_prob, share=0.25)", [0.05, 0.2, 0.04, 0.5], [2]),
        ("edit(mode=low_prob, tau=0.3, share=0.5)", [0.05, 0.2, 0.04, 0.5], [0, 2]),
        ("edit(mode=t2t_remask, share=1)", [0.05, 0.2, 0.04, 0.5], [1, 3]),
        ("edit(mode=t2t_remask)", [0.05, 0.2, 0.04, 0.5], [3]),  # the surest other choice
    ],
)
def test_suspects_return_to_undecided(spec: str, own: list[float], taken: list[int]) -> None:
    canvas, sampler = started(spec, 4, 1)
    decision = step(canvas, sampler, [7, 9, 9, 9, 5], [0.95, 0.91, 0.8, 0.99, 0.9], [*own, 1.0])
    assert decision.remasked.tolist() == taken
    assert canvas.masked[taken].all()
    assert decision.committed.tolist() == [4]


def test_a_drop_needs_a_forward_before() -> None:
    canvas, sampler = started("edit(mode=logit_diff, tau=0.25, share=1)", 2, 2)
    first = step(canvas, sampler, [7, 7, 5, 5], [0.9] * 4, [0.6, 0.8, 1.0, 1.0])
    assert first.remasked.size == 0  # nothing to compare with
    last = step(canvas, sampler, [7, 7, 5, 5], [0.9] * 4, [0.5, 0.5, 0.7, 0.64])
    # 0 fell by 0.1, 1 by 0.3; those committed last had 0.9: 2 fell by 0.2, 3 by 0.26
    assert last.remasked.tolist() == [1, 3]


def test_a_position_is_taken_back_so_often_and_no_more() -> None:
    canvas, sampler = started("edit(mode=low_prob, per_position=2, share=1, post_steps=99)", 2, 0)
    taken = []
    for _ in range(6):
        open_ = canvas.masks().size
        own = [0.01] * 2
        decision = step(canvas, sampler, [7, 7], [0.9, 0.9], own)
        taken.append(decision.remasked.tolist())
        if not canvas.revising:
            break
        assert bool(canvas.masks().size) == bool(decision.remasked.size), open_
    # both go at once, so that the block begins again and nothing of it is remembered
    assert taken == [[0, 1], [], [0, 1], [], [0, 1], []]
    canvas, sampler = started("edit(mode=low_prob, per_position=2, share=0.5, post_steps=99)", 2, 0)
    taken = []
    while canvas.revising:
        decision = step(canvas, sampler, [7, 7], [0.9, 0.9], [0.01, 0.02])
        taken += decision.remasked.tolist()
    assert sorted(taken) == [0, 0, 1, 1]


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


def test_remasking_lets_a_decided_block_go_that_ends_the_text() -> None:
    for mode, again in (("low_prob", False), ("t2t", True)):
        canvas, sampler = started(f"edit(mode={mode})", 1, 1, stop_ids=(EOS,))
        step(canvas, sampler, [7, EOS], [0.9, 0.9], [0.9, 0.9])
        assert canvas.revising is again
        assert canvas.finished is not again


def test_limits_of_remasking_belong_to_its_modes() -> None:
    with pytest.raises(ConfigError, match="choose a mode"):
        compose("edit(share=0.5)")
    with pytest.raises(dllm.DllmError, match="low_prob"):
        compose("edit(mode=lowprob)")


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
    canvas, sampler = started("edit(mode=low_prob)", 2, 0)
    canvas.state(Edits).post = 5
    sampler.parts[-1].begin_block(canvas)
    assert canvas.state(Edits).post == 0
