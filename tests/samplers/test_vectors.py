"""Tables of numbers: what each rule commits, given scores."""

import numpy as np
import pytest

from dllm.core.canvas import Canvas
from dllm.samplers import Decision, Prediction, Sampler, Seen, compose
from dllm.samplers.base import even_share
from dllm.samplers.dream import transfer_rate
from dllm.samplers.eos import CHECKS

STOP = 30


def canvas_of(masks: int, prompt: int = 0, **facts: object) -> Canvas:
    ids = np.arange(prompt, dtype=np.int64)
    canvas = Canvas.for_prompt(ids, masks, mask_id=31, pad_id=STOP)
    for name, value in facts.items():
        setattr(canvas, name, value)
    return canvas


def decide(
    sampler: Sampler, canvas: Canvas, prediction: Prediction, masks: Prediction | None = None
) -> Decision:
    """A step of the row as it is fed; ``masks``: what is said of positions fed once more."""
    return sampler.decide(canvas, sampler.feeds(canvas), [Seen(canvas, prediction, masks)])


def predict(
    canvas: Canvas, probabilities: list[float], entropy: list[float] | None = None,
    margin: list[float] | None = None, tokens: list[int] | None = None,
) -> Prediction:  # fmt: skip
    """A prediction of the window's undecided positions."""
    positions = canvas.masks()
    assert len(probabilities) == len(positions)
    as_array = lambda x: None if x is None else np.array(x, np.float32)  # noqa: E731
    return Prediction(
        positions, np.array(tokens or [1] * len(positions)),
        np.log(np.array(probabilities, np.float32)),
        margin=as_array(margin), entropy=as_array(entropy),
    )  # fmt: skip


def committed(spec: str, probabilities: list[float], **statistics: list[float]) -> set[int]:
    """Positions a fresh canvas commits in its first step."""
    sampler = compose(spec)
    canvas = canvas_of(len(probabilities))
    assert sampler.prepare(canvas)
    return set(decide(sampler, canvas, predict(canvas, probabilities, **statistics)).committed)


@pytest.mark.parametrize(
    ("n", "steps", "expected"),
    [(10, 4, [3, 3, 2, 2]), (5, 8, [1, 1, 1, 1, 1, 0, 0, 0])],
    ids=["T1", "T2"],
)
def test_quota_is_even_with_the_larger_shares_first(
    n: int, steps: int, expected: list[int]
) -> None:
    assert [even_share(n, steps, step) for step in range(steps)] == expected


def schedule(sampler: Sampler, masks: int) -> list[int]:
    """Commits per step, rests included, until nothing is left."""
    canvas, counts = canvas_of(masks), []
    while canvas.masked.any():
        before = int(canvas.masked.sum())
        if sampler.prepare(canvas):
            decide(sampler, canvas, predict(canvas, [0.5] * before, entropy=[1.0] * before))
        counts.append(before - int(canvas.masked.sum()))
        canvas.step += 1
        canvas.block_step += 1
    return counts


@pytest.mark.parametrize(
    ("masks", "steps", "expected"),
    [
        (8, 8, [0, 1, 1, 1, 1, 1, 1, 2]),
        (8, 4, [1, 2, 2, 3]),
        (16, 8, [1, 2, 2, 2, 2, 2, 2, 3]),
        (256, 256, [0, *[1] * 254, 2]),
        (256, 128, [1, *[2] * 126, 3]),
        (256, 64, [3, *[4] * 62, 5]),
        (512, 256, [1, *[2] * 254, 3]),
    ],
)
def test_dream_schedule_truncates_and_dumps_the_rest(
    masks: int, steps: int, expected: list[int]
) -> None:
    """T3 and the published table."""
    assert schedule(compose("dream", options={"steps": steps}), masks) == expected


@pytest.mark.parametrize(("masks", "zeros", "last"), [(1024, 2, 3), (768, 1, 2), (512, 1, 2)])
def test_long_dream_schedules(masks: int, zeros: int, last: int) -> None:
    counts = schedule(compose("dream", options={"steps": masks}), masks)
    assert counts.count(0) == zeros
    assert counts[-1] == last


def test_dream_schedule_with_more_steps_than_positions() -> None:
    assert schedule(compose("dream", options={"steps": 512}), 256).count(0) == 257


def commits(sampler: Sampler, canvas: Canvas) -> list[list[int]]:
    """Commits per step, block by block."""
    counts: list[list[int]] = []
    while canvas.masked.any():
        if sampler.prepare(canvas):
            row = [0.5] * len(canvas.masks())
            decision = decide(sampler, canvas, predict(canvas, row, entropy=row))
            counts += [[]] * (canvas.block + 1 - len(counts))
            counts[canvas.block] = [*counts[canvas.block], len(decision.committed)]
        canvas.step += 1
        canvas.block_step += 1
    return counts


def test_a_position_reveals_itself_below_the_rate() -> None:
    """Noise as large as the rate does not."""
    rate = transfer_rate(4, 1e-3, 0)
    for noise, reveals in ((rate, False), (np.nextafter(rate, np.float32(0)), True)):
        canvas = canvas_of(4, noise=lambda stream, step, at, u=noise: np.full(len(at), u))
        assert compose("dream(alg=origin)", options={"steps": 4}).prepare(canvas) is reveals


def test_a_block_has_its_share_of_the_steps_whatever_is_given_in_it() -> None:
    """1.1: steps per block are S K / N; only the positions to share out vary."""
    canvas = canvas_of(32)
    canvas.give(24, np.full(4, 5))
    result = commits(compose("llada", options={"steps": 16, "block_length": 8}), canvas)
    assert result == [[2, 2, 2, 2]] * 3 + [[1, 1, 1, 1]]


@pytest.mark.parametrize("steps", [4, 8])
def test_one_position_of_a_block_is_decided_in_one_step(steps: int) -> None:
    canvas = canvas_of(32)
    canvas.give(8, np.full(7, 5))
    result = commits(compose("llada", options={"steps": steps, "block_length": 8}), canvas)
    assert result == [[8] if steps == 4 else [4, 4], [1], *[[8] if steps == 4 else [4, 4]] * 2]


def test_a_region_cut_short_ends_in_a_block_that_has_a_step() -> None:
    sampler, canvas = compose("llada", options={"steps": 4, "block_length": 8}), canvas_of(32)
    sampler.prepare(canvas)
    canvas.cut(16)  # 4 steps * 1 position / 32 is none
    assert commits(sampler, canvas) == [[8], [8], [1]]


def test_transfer_rates_equal_those_of_a_float32_linspace() -> None:
    import torch

    for steps in (*range(1, 70), 128, 255, 256, 511, 512, 1000):
        t = torch.linspace(1, 1e-3, steps + 1)
        rates = [transfer_rate(steps, 1e-3, step) for step in range(steps)]
        assert (1 - t[1:] / t[:-1]).tolist() == rates


@pytest.mark.parametrize(
    ("spec", "probabilities", "expected"),
    [
        pytest.param("threshold(0.9)", [0.95, 0.91, 0.3], {0, 1}, id="T4"),
        pytest.param("threshold(0.9)", [0.4, 0.7, 0.7], {1}, id="T5"),
        pytest.param("factor(1)", [0.99, 0.95, 0.9, 0.6], {0, 1, 2}, id="T6"),
        pytest.param("factor(1)", [0.99, 0.95, 0.9, 0.85], {0, 1, 2, 3}, id="T7"),
        pytest.param("factor(1)", [0.4, 0.3], {0}, id="T8"),
        pytest.param("factor(1)", [0.9, 0.7, 0.76, 0.9], {0, 2, 3}, id="T9"),
        pytest.param("factor(2)", [0.5, 0.5, 0.5], {0, 1, 2}, id="reaches 1 - 2 / 4"),
        pytest.param("hierarchical(0.5, 0.25)", [0.5, 0.5], {0}, id="does not exceed 0.5"),
        pytest.param("threshold(0.9, n=2)", [0.4, 0.7, 0.6], {1, 2}, id="the two best"),
        pytest.param("threshold(0)", [0.1, 0.2, 0.1], {0, 1, 2}, id="whole-block"),
        pytest.param("threshold(inf)", [1.0, 1.0, 0.9], {0}, id="one-per-step"),
        pytest.param("llada", [0.3, 0.5, 0.5], {1}, id="one-per-step-tie"),
        pytest.param("d2f(0.5)", [0.5, 0.4, 0.3], {0}, id="the best is the first of its block"),
    ],
)
def test_selection(spec: str, probabilities: list[float], expected: set[int]) -> None:
    assert committed(spec, probabilities) == expected


@pytest.mark.parametrize(
    ("gamma", "entropy", "expected"),
    [
        pytest.param(0.1, [0, 0.01, 0.2, 0.5], 3, id="T12"),
        pytest.param(0.0, [1, 2], 1),
        pytest.param(0.0, [0, 0, 0, 0.3], 4),
        pytest.param(np.inf, [1, 2, 3], 3),
        pytest.param(0.25, [0.25, 0.25, 0.5], 2, id="reaches the bound"),
    ],
)
def test_entropy_bound(gamma: float, entropy: list[float], expected: int) -> None:
    same = [0.5] * len(entropy)
    result = committed(f"eb(gamma={gamma}, proxy=entropy)", same, entropy=entropy, margin=same)
    assert result == set(range(expected))


def test_entropy_bound_takes_the_running_maximum_along_another_order() -> None:
    entropy, probabilities = [0.3, 0.01, 0.2, 0.5], [0.9, 0.8, 0.7, 0.6]
    statistics = {"entropy": entropy, "margin": probabilities}
    counts = [
        len(committed(f"eb(gamma={gamma})", probabilities, **statistics))
        for gamma in (0.005, 0.05, 0.3, 0.6)
    ]
    assert counts == [1, 2, 3, 4]  # left sides 0, .01, .21, .51


def test_entropy_threshold() -> None:
    assert committed("dparallel(0.5)", [0.1] * 3, entropy=[0.4, 0.6, 0.5]) == {0, 2}
    assert committed("dparallel(0.5)", [0.1] * 3, entropy=[0.9, 0.6, 0.7]) == {1}
    assert committed("wedlm(0.5, penalty=0)", [0.1] * 3, entropy=[0.4, 0.5, 0.3]) == {0, 2}


def test_comparators_are_those_of_the_family() -> None:
    """G13"""
    entropy = {"entropy": [0.5, 0.25, 0.6]}
    for family, expected in ("llada", {0, 1}), ("dream", {1}):
        sampler, canvas = compose("dparallel(0.5)", family=family), canvas_of(3)
        sampler.prepare(canvas)
        result = decide(sampler, canvas, predict(canvas, [0.1] * 3, **entropy))
        assert set(result.committed) == expected


def at_eos() -> Canvas:
    """Stop id decided at 5, a token at 7, masks at 6 and 8..9; 0..4 decided, but 3 is open."""
    canvas = canvas_of(10, window=(4, 8), block=0)
    for position in (0, 1, 2, 4, 5, 7):
        token = STOP if position == 5 else 1
        canvas.commit(np.array([position]), np.array([token]), np.array([-0.1], np.float32))
    return canvas


def test_first_commit_ends_the_region_at_once() -> None:
    """T23"""
    canvas = at_eos()
    CHECKS["first_commit"](canvas, np.array([5]), (STOP,))
    assert canvas.tokens[6:].tolist() == [STOP] * 4
    assert (canvas.end, canvas.stop_position, canvas.finished) == (6, 5, False)
    assert np.flatnonzero(canvas.masked).tolist() == [3]
    assert canvas.length == 10  # the padding goes on being fed
    shorter = at_eos()
    CHECKS["first_commit_cut"](shorter, np.array([5]), (STOP,))
    assert (shorter.end, shorter.stop_position, shorter.length) == (6, 5, 6)
    # a stop id farther left ends the region once more
    canvas.commit(np.array([3]), np.array([STOP]), np.array([-0.1], np.float32))
    CHECKS["first_commit"](canvas, np.array([3]), (STOP,))
    assert (canvas.end, canvas.length, canvas.tokens[4]) == (4, 10, STOP)


def test_block_contains_waits_for_the_block() -> None:
    """T24"""
    canvas = at_eos()
    CHECKS["block_contains"](canvas, np.array([5]), (STOP,))
    assert not canvas.finished
    canvas.commit(np.array([6]), np.array([1]), np.zeros(1, np.float32))
    CHECKS["block_contains"](canvas, np.array([6]), (STOP,))
    assert canvas.finish_reason == "stop"
    assert not canvas.masked[6:].any()


def test_prefix_complete_needs_everything_left_of_the_stop() -> None:
    """T24b"""
    canvas = at_eos()
    CHECKS["prefix_complete"](canvas, np.array([5]), (STOP,))
    assert not canvas.finished
    canvas.commit(np.array([3]), np.array([1]), np.zeros(1, np.float32))
    CHECKS["prefix_complete"](canvas, np.array([3]), (STOP,))
    assert (canvas.finish_reason, canvas.stop_position) == ("stop", 5)
    assert canvas.tokens[6:].tolist() == [STOP] * 4


def test_block_all_wants_nothing_but_stops() -> None:
    canvas = canvas_of(4, window=(2, 4), block=1)
    canvas.commit(np.array([0, 1, 2]), np.array([1, 2, STOP]), np.zeros(3, np.float32))
    CHECKS["block_all"](canvas, np.array([2]), (STOP,))
    assert not canvas.finished
    canvas.commit(np.array([3]), np.array([STOP]), np.zeros(1, np.float32))
    CHECKS["block_all"](canvas, np.array([3]), (STOP,))
    assert canvas.stop_position == 2
    canvas = canvas_of(8, window=(0, 4), block=0)
    canvas.give(6, np.array([1]))  # the text goes on behind the block
    canvas.commit(np.arange(4), np.full(4, STOP), np.zeros(4, np.float32))
    CHECKS["block_all"](canvas, np.arange(4), (STOP,))
    assert not canvas.finished and canvas.tokens[6] == 1


def test_rank_last_orders_stops_behind_everything_and_still_selects_them() -> None:
    sampler = compose("llada", options={"eos_policy": "rank_last"}, stop_ids=(STOP,))
    canvas, order = canvas_of(3), []
    for tokens in ([STOP, 1, STOP], [STOP, STOP], [STOP]):
        probabilities = [0.9, 0.1, 0.8][: len(tokens)]
        sampler.prepare(canvas)
        order += decide(
            sampler, canvas, predict(canvas, probabilities, tokens=tokens)
        ).committed.tolist()
        canvas.block_step += 1
        if canvas.finished:
            break
    assert order[:2] == [1, 0]
