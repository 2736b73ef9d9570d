"""Prophet's bar, its count of progress, and where it looks for the answer."""

import numpy as np
import pytest

from dllm.samplers import Prediction, compose
from dllm.samplers.llada import Quota
from dllm.samplers.prophet import Prophet

from .test_vectors import canvas_of, decide


@pytest.mark.parametrize(("step", "gap"), [(84, 7.5), (85, 5.0), (171, 5.0), (172, 2.5)])
def test_prophet_lowers_its_bar(step: int, gap: float) -> None:
    """T14."""
    canvas = canvas_of(256)
    canvas.step = step - 1
    assert Prophet(steps=256).threshold(canvas) == gap


def test_prophet_counts_the_steps_of_a_block_that_has_less_to_decide() -> None:
    """The released code runs them all: what is given in a block takes no step from the count."""
    canvas, sampler = canvas_of(6), compose("prophet+llada(steps=6)", options={"block_length": 3})
    canvas.give(0, np.array([5]))
    for at in ([1, 2], [3]):  # one per step, then the second block
        for position in at:
            sampler.prepare(canvas)
            canvas.commit(np.array([position]), np.array([1]), np.zeros(1, np.float32))
            canvas.step, canvas.block_step = canvas.step + 1, canvas.block_step + 1
    (prophet,) = sampler.stops
    assert prophet.threshold(canvas) == 2.5  # type: ignore[attr-defined]  # step 5 of 6
    canvas = canvas_of(8, prompt=4, window=(6, 8))
    canvas.states[Quota] = Quota()
    assert Prophet().threshold(canvas) == Prophet().mid  # two steps stood before, of eight


def test_an_answer_that_starts_behind_the_text_is_empty() -> None:
    for start in (40, 2**70):
        assert not Prophet(start=start).span(canvas_of(40)).size


@pytest.mark.parametrize(("gap", "fills"), [(7.6, True), (7.4, False)])
def test_prophet_commits_everything_at_once(gap: float, fills: bool) -> None:
    canvas, sampler = canvas_of(40), compose("prophet(start=2, answer=3)")
    sampler.prepare(canvas)
    at, _ = sampler.reads(canvas)
    assert at.tolist() == list(range(40))  # the window is 32 long, the region 40
    gaps = np.where((at >= 2) & (at < 5), gap, 0.0).astype(np.float32)
    prediction = Prediction(at, np.ones(40, np.int64), np.full(40, -1.0, np.float32), gap=gaps)
    assert (len(decide(sampler, canvas, prediction).committed) == 40) is fills


def test_prophet_finds_the_answer_behind_given_text() -> None:
    """5.1: it starts at the last given offset and 2."""
    canvas, sampler = canvas_of(32, prompt=3), compose("prophet(answer=4)")
    canvas.give(3 + 12, np.array([5, 5, 5]))
    sampler.prepare(canvas)
    (prophet,) = sampler.stops
    assert prophet.span(canvas).tolist() == [19, 20, 21, 22]  # type: ignore[attr-defined]
    canvas.masked[19] = False
    assert prophet.span(canvas).tolist() == [19, 20, 21, 22]  # type: ignore[attr-defined]
    assert Prophet(answer=4, include_committed=False).span(canvas).tolist() == [20, 21, 22]
    everywhere = Prophet(region="all_masked").span(canvas)
    assert everywhere.tolist() == np.flatnonzero(canvas.masked).tolist()
    canvas.give(33, np.array([5, 5]))  # nothing fits behind it
    assert prophet.span(canvas).tolist() == np.flatnonzero(canvas.masked).tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "gap"),
    [
        ("prophet", 7.5),  # LLaDA's schedule: step 1 of 100
        ("prophet(progress=tokens)", 5.0),
        ("threshold+prophet", 5.0),  # no schedule: half is decided
        ("threshold+prophet(progress=steps)", 7.5),
        ("threshold+prophet(steps=2)", 5.0),  # step 1 of 2
        ("prophet(steps=2)", 5.0),
        ("dream+prophet", 7.5),
    ],
)
def test_prophet_counts_steps_or_tokens(spec: str, gap: float) -> None:
    canvas, (part,) = canvas_of(100), compose(spec).stops
    canvas.masked[:50] = False
    assert part.threshold(canvas) == gap  # type: ignore[attr-defined]


def test_prophet_counts_the_steps_of_the_whole_region() -> None:
    """What is given in it belongs to the length that the published progress divides by."""
    canvas = canvas_of(100)
    canvas.give(40, np.ones(60, np.int64))
    canvas.step = 32  # the 33rd step: 0.33 of 100, not of the 40 undecided
    assert Prophet().threshold(canvas) == 5.0
    canvas.step = 31
    assert Prophet().threshold(canvas) == 7.5
