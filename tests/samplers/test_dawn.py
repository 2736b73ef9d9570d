"""DAWN on attention maps written by hand."""

import numpy as np
import pytest

import dllm
from dllm.cache import compose as compose_cache
from dllm.core.canvas import Canvas
from dllm.engine import check_pair
from dllm.samplers import Prediction, View, compose
from dllm.samplers.dawn import DAWN, independent

from ..table import EOS, MASK

PROMPT, LENGTH = 2, 8


def chosen(
    probability: dict[int, float], edges: list[tuple[int, int]], sinks: tuple[int, ...] = (),
    **thresholds: float,
) -> list[int]:  # fmt: skip
    """Positions committed of masks 2..7; ``edges`` (i, j): i leans on j; the prompt has 0.95."""
    canvas = Canvas.for_prompt(np.array([1, 2]), LENGTH - PROMPT, mask_id=MASK, pad_id=EOS)
    canvas.open_window(PROMPT, LENGTH)
    attention = np.zeros((LENGTH, LENGTH), np.float32)
    for i, j in edges:
        attention[i, j] = 0.3
    attention[:, list(sinks)] = 0.5
    p = np.array([probability.get(i, 0.95 if i < PROMPT else 0.1) for i in range(LENGTH)])
    positions = np.arange(LENGTH)
    everything = Prediction(positions, positions, np.log(p).astype(np.float32), attention=attention)
    here = everything.of_window(canvas)
    usual = {"tau": 0.9, "tau_sink": 0.2, "tau_edge": 0.2, "tau_induce": 0.6, "tau_low": 0.5}
    part = DAWN(**usual | thresholds)  # type: ignore[arg-type]
    view = View(canvas, here, np.exp(here.logprob), everything)
    return here.positions[part.select(view)].tolist()


@pytest.mark.parametrize(("probability", "edges", "sinks", "expected"), [
    ({2: 0.95, 3: 0.4}, [], (), [2]),  # sure
    ({3: 0.55, 5: 0.45}, [], (), [3]),  # nothing leans on it, and it is not too unsure
    ({4: 0.7}, [(4, 0)], (), [4]),  # leans on the prompt
    ({0: 0.5, 4: 0.45}, [(4, 0)], (), []),  # neither kind
    ({3: 0.8, 4: 0.7}, [(3, 4)], (), [3]),  # one leans on the other: the better
    ({3: 0.7, 4: 0.8}, [(3, 4)], (), [4]),
    ({3: 0.8, 4: 0.7, 5: 0.6}, [(3, 4), (4, 5)], (), [3, 5]),
    ({3: 0.8, 4: 0.7}, [(3, 0), (4, 0)], (), [3, 4]),  # both induced: conflicts do not matter
    ({3: 0.8, 4: 0.7}, [(3, 4)], (4,), [3, 4]),  # what everybody looks at is no reason
    ({2: 0.95, 3: 0.55}, [(2, 0), (3, 2)], (), [2]),  # leans on what is sure and induced: later
    ({2: 0.95, 3: 0.55}, [(3, 2)], (), [2, 3]),
])  # fmt: skip
def test_three_kinds_are_committed(
    probability: dict[int, float], edges: list[tuple[int, int]], sinks: tuple[int, ...],
    expected: list[int],
) -> None:  # fmt: skip
    assert chosen(probability, edges, sinks) == expected


def score(probability: float) -> float:
    """What a view says of it, in float32."""
    return float(np.exp(np.log(np.array([probability])).astype(np.float32))[0])


def test_what_equals_a_threshold() -> None:
    """Probabilities and attention reach theirs, the mean of a sink exceeds it."""
    leaning = [(2, 0), (3, 2)]  # 3 leans on 2, which is sure and induced: it is sure, or waits
    assert chosen({2: 0.95, 3: 0.55}, leaning, tau=score(0.55), tau_low=0.1) == [2, 3]
    assert chosen({4: 0.45}, [(4, 0)], tau_induce=score(0.45)) == [4]
    assert chosen({3: 0.55}, [], tau_low=score(0.55)) == [3]
    anchored = {"tau": score(0.8), "tau_low": 0.75}
    assert chosen({0: 0.8, 4: 0.7}, [(4, 0)], **anchored) == [4]
    assert chosen({3: 0.8, 4: 0.7}, [(3, 4)], tau_edge=0.3) == [3]
    assert chosen({3: 0.8, 4: 0.7}, [(3, 4)], (4,), tau_sink=0.5) == [3]


def test_independent_sets_are_greedy() -> None:
    conflict = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]], bool)
    assert independent(conflict, np.array([0.1, 0.9, 0.2])).tolist() == [1]
    assert independent(conflict, np.array([0.5, 0.4, 0.2])).tolist() == [0, 2]
    assert independent(conflict[:0, :0], np.zeros(0)).tolist() == []


def test_defaults_follow_the_family() -> None:
    (llada,), (dream,) = (compose("dawn", family=f).selectors for f in ("llada", "dream"))
    assert (llada.tau_low, dream.tau_edge) == (0.75, 0.10)  # type: ignore[attr-defined]
    assert llada.statistics == {"attention": 4}


def test_caches_that_compute_less_cannot_serve_it() -> None:
    check_pair(compose("dawn"), compose_cache("none"))
    with pytest.raises(dllm.ConfigError, match=r"dawn needs .* which cache='dual' does not offer"):
        check_pair(compose("dawn"), compose_cache("dual"))


def test_settings_are_checked() -> None:
    for spec in ("dawn(tau_sink=2)", "dawn(layers=0)", "dawn(tau=-1)"):
        with pytest.raises(dllm.ConfigError):
            compose(spec)
