"""Windows and ends that depend on what the model says."""

import numpy as np
import pytest

from dllm.core.canvas import Canvas
from dllm.engine.turn import complete
from dllm.samplers import Prediction, Sampler, compose

from .test_vectors import STOP, canvas_of, decide


def step(sampler: Sampler, canvas: Canvas, p: np.ndarray, tokens: np.ndarray | None = None) -> set:
    """One decision with probabilities (N,) given for the whole canvas."""
    assert sampler.prepare(canvas)
    at, _ = sampler.reads(canvas)
    ids = np.ones(len(canvas.tokens), np.int64) if tokens is None else tokens
    logprob = np.log(p.astype(np.float32))
    prediction = Prediction(at, ids[at], logprob[at], max_logprob=logprob[at], entropy=-logprob[at])
    result = decide(sampler, canvas, prediction)
    canvas.step += 1
    canvas.block_step += 1
    return set(result.committed)


@pytest.mark.parametrize(("p", "end"), [(0.95, 5), (0.85, 10)])
def test_eotp_cuts_at_a_sure_stop(p: float, end: int) -> None:
    canvas = canvas_of(10)
    sampler = compose("threshold(0.99)+eotp(tau=0.9)", stop_ids=(STOP,))
    tokens = np.array([1, 1, 1, 1, STOP, 1, STOP, 1, 1, 1])
    chances = np.array([0.97, 0.4, 0.3, 0.2, p, 0.1, 0.1, 0.1, 0.1, 0.1])
    step(sampler, canvas, chances, tokens)
    assert canvas.end == end
    while not canvas.finished and canvas.masked[: canvas.end].any():
        step(sampler, canvas, chances, tokens)
    assert canvas.stop_position == 4  # what lies left of it was decided as usual
    assert (canvas.tokens[:4] == 1).all() and not canvas.masked[:5].any()


@pytest.mark.parametrize(
    ("chances", "end"),
    [
        ([0.97, 0.4, 0.91, 0.2, 0.3, 0.1, 0.95, 0.1], 7),  # the surest of those that are proposed
        ([0.4, 0.4, 0.97, 0.2, 0.3, 0.1, 0.96, 0.1], 3),  # the one that is committed
        ([0.4, 0.4, 0.96, 0.2, 0.3, 0.1, 0.97, 0.1], 7),
        ([0.4, 0.4, 0.995, 0.2, 0.3, 0.1, 0.997, 0.1], 3),  # both are: the first
    ],
)
def test_eotp_prefers_what_is_committed_then_what_is_sure(chances: list[float], end: int) -> None:
    canvas = canvas_of(8)
    sampler = compose("threshold(0.99)+eotp(tau=0.9)", stop_ids=(STOP,))
    tokens = np.array([1, 1, STOP, 1, 1, 1, STOP, 1])
    step(sampler, canvas, np.array(chances), tokens)
    assert canvas.end == end


def test_eotp_keeps_given_text() -> None:
    canvas, sampler = canvas_of(10), compose("threshold(0.99)+eotp", stop_ids=(STOP,))
    canvas.give(6, np.array([7, 8]))
    tokens = np.array([1, 1, STOP, 1, 1, 1, 7, 8, 1, STOP])
    step(sampler, canvas, np.full(10, 0.95), tokens)
    assert canvas.end == 10
    assert canvas.tokens[6:8].tolist() == [7, 8]


def test_a_text_that_eotp_ends_is_no_shorter_than_wanted() -> None:
    """Also where another token is committed at its end: "length" is for a canvas that is full."""
    canvas, sampler = canvas_of(10), compose("threshold(0.99)+eotp(tau=0.9)", stop_ids=(STOP,))
    tokens = np.array([1, 1, 1, 1, STOP, 1, 1, 1, 1, 1])
    chances = np.array([0.97, 0.4, 0.3, 0.2, 0.95, 0.1, 0.1, 0.1, 0.1, 0.1])
    step(sampler, canvas, chances, tokens)
    assert canvas.end == 5
    tokens[4] = 1
    while canvas.masked[: canvas.end].any():
        step(sampler, canvas, chances, tokens)
    assert canvas.stop_position is None and complete(canvas)
    assert canvas.finish_reason == "stop"
    full = canvas_of(2)
    full.commit(np.arange(2), np.array([1, 1]), np.zeros(2, np.float32))
    assert complete(full) and full.finish_reason == "length"


def test_eotp_leaves_the_only_position_alone() -> None:
    canvas = canvas_of(1)
    sampler = compose("threshold+eotp", stop_ids=(STOP,))
    step(sampler, canvas, np.array([0.99]), np.array([STOP]))
    assert canvas.finished and canvas.stop_position == 0


@pytest.mark.parametrize(("origin", "ends"), [(None, [7, 11, 14]), (0, [4, 8, 12, 14])])
def test_dcd_keeps_to_the_blocks_of_the_attention(origin: int | None, ends: list[int]) -> None:
    """Counted from the end of the prompt, or from where a block-causal model counts them."""
    canvas = canvas_of(11, prompt=3, origin=origin)
    sampler = compose("fixed(4)+dcd(s_init=4, block_length=4)")
    seen = []
    while canvas.masked.any():
        step(sampler, canvas, np.full(14, 0.5))
        seen.append(canvas.window[1])
    assert seen == ends


@pytest.mark.parametrize(
    "window", ["multi_blocks(4, lookahead=0)", "staged_blocks(4, 1.0, decoded_token_threshold=1.0)"]
)
@pytest.mark.parametrize(("origin", "ends"), [(None, [7, 11, 14]), (0, [4, 8, 12, 14])])
def test_several_open_blocks_keep_to_those_of_the_attention(
    window: str, origin: int | None, ends: list[int]
) -> None:
    canvas = canvas_of(11, prompt=3, origin=origin)
    sampler = compose(f"fixed(4)+{window}")
    seen = []
    while canvas.masked.any():
        step(sampler, canvas, np.full(14, 0.5))
        seen.append(canvas.window[1])
    assert seen == ends


def test_blocks_that_are_given_open_with_the_first_that_is_not() -> None:
    """Behind 8 given tokens the window ended before it began, and a step decided nothing."""
    canvas = canvas_of(12)
    canvas.give(canvas.start, np.full(8, 5))
    sampler = compose("threshold+staged_blocks(2)")
    sampler.prepare(canvas)
    assert canvas.window == (canvas.start + 8, canvas.start + 10)
