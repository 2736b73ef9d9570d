"""R2's rules: neighbourhoods, runs, streaks (T17)."""

import math
from typing import Any

import numpy as np
import pytest

from dllm.samplers import THE_ROW, Prediction, Seen, Turn, compose

from ..table import MASK
from .test_vectors import canvas_of, decide, predict

LOW, HIGH = [0.05, 0.06, 0.07], [0.75, 0.9, 0.85]  # probabilities of what was drawn


def r2(tokens: list[int], probabilities: list[float], **rules: Any) -> set[int]:
    """What the rules add in a block where nothing reaches the threshold."""
    given = {"confidence_cluster_size": None, "token_cluster": None, "temporal_steps": None} | rules
    spec = f"threshold(0.99)+r2({', '.join(f'{k}={v!r}' for k, v in given.items())})"
    sampler, canvas = compose(spec), canvas_of(len(tokens))
    sampler.prepare(canvas)
    turn = Turn(sampler, sampler.courses, canvas, THE_ROW,
                [Seen(canvas, predict(canvas, probabilities, tokens=tokens))])  # fmt: skip
    turn.choose(force=False)
    return set(turn.commit().tolist())


def test_r2_clusters_and_runs() -> None:
    """T17."""
    ids = [1, 2, 3, 4, 5, 6]
    assert r2(ids, [0.85, 0.82, 0.75, 0.4, 0.9, 0.6], confidence_cluster_size=3) == {0, 1, 2}
    assert r2(
        ids, [1, 1, 1, 0.4, 0.9, 0.6], confidence_cluster_size=3, spatial_threshold=math.inf
    ) == {0, 1, 2}
    runs = [1, 1, 2, 2, 2, 3]
    chances = [0.5, 0.85, 0.3, 0.4, 0.7, 0.9]
    assert r2(runs, chances, confidence_cluster_size=3, token_cluster="confidence") == {1}
    assert r2(runs, chances, token_cluster="confidence") == set()  # the official code wants a size
    run: dict[str, Any] = {"confidence_cluster_size": 3, "token_cluster": "confidence"}
    assert r2([1, 1, 2], [0.5, 0.25, 0.01], spatial_threshold=0.5, **run) == set()  # not above it
    assert r2([1, 1, 2], [0.75, 0.25, 0.01], spatial_threshold=0.5, **run) == {0}


@pytest.mark.parametrize(
    ("rule", "drawn", "likeliest", "tokens", "p"),
    [
        ("confidence_cluster_size=3", LOW, [3, 1, 2], [MASK, MASK, 9], [1, 1, 0.07]),
        ("confidence_cluster_size=3", HIGH, [3, 1, 2], [7, 8, 9], HIGH),
        (
            "confidence_cluster_size=3, token_cluster='confidence'",
            LOW, [1, 1, 2], [MASK, 1, 9], [1, 0.9, 0.07],
        ),
        ("temporal_steps=1", LOW, [3, 1, 2], [3, 1, 9], [0.8, 0.9, 0.07]),
    ],
    ids=["unlikely cluster", "cluster", "run", "streak"],
)  # fmt: skip
def test_r2_knows_the_probability_of_what_it_commits(
    rule: str, drawn: list[float], likeliest: list[int], tokens: list[int], p: list[float]
) -> None:
    """With temperature: a neighbourhood is committed as sampled, runs and streaks as likeliest."""
    off = ["confidence_cluster_size=None", "token_cluster=None", "temporal_steps=None"]
    rules = [rule, *(other for other in off if other.split("=")[0] not in rule)]
    canvas, sampler = canvas_of(3), compose(f"threshold(0.99)+r2({', '.join(rules)})")
    sampler.prepare(canvas)
    log = lambda x: np.log(np.array(x, np.float32))  # noqa: E731
    decision = decide(sampler, canvas,
        Prediction(
            np.arange(3), np.array([7, 8, 9]), log(drawn),
            max_logprob=log([0.8, 0.9, 0.85]), top_token=np.array(likeliest)[:, None],
        ),
    )  # fmt: skip
    assert canvas.tokens.tolist() == tokens  # the last one is forced, as it was sampled
    assert np.exp(canvas.logprob) == pytest.approx(p)
    assert decision.bits == pytest.approx(-np.log2(p).sum(), rel=1e-5)


def test_r2_commits_what_stays_the_same() -> None:
    sampler = compose(
        "fixed+r2(confidence_cluster_size=None, token_cluster=None, temporal_steps=2)"
    )
    canvas = canvas_of(4)
    for probabilities, expected in ([0.5, 0.85, 0.3, 0.6], {1}), ([0.5, 0.9, 0.7], {2, 3}):
        sampler.prepare(canvas)
        tokens = [7, 8, 9, 7][: len(probabilities)] if canvas.step == 0 else [7, 6, 7]
        result = decide(sampler, canvas, predict(canvas, probabilities, tokens=tokens))
        canvas.step += 1
        if canvas.step == 2:  # position 2's token has changed, position 3's probability is low
            assert set(result.committed) == {2}
        else:
            assert set(result.committed) == expected


@pytest.mark.parametrize(("how", "threshold", "stable"), [
    ("ave", 0.49, True), ("ave", 0.51, False), ("max", 0.59, True), ("max", 0.61, False),
    ("last", 0.39, True), ("last", 0.41, False),
])  # fmt: skip
def test_what_a_streak_is_worth(how: str, threshold: float, stable: bool) -> None:
    """Of 0.6 and then 0.4; the mean is not their sum."""
    spec = f"threshold(0.99)+r2(temporal_steps=2, temporal_eval={how}, temporal_threshold={{}}"
    off = ", confidence_cluster_size=None, token_cluster=None)"
    sampler, canvas = compose(spec.format(threshold) + off), canvas_of(3)
    for probability in (0.6, 0.4):
        sampler.prepare(canvas)
        turn = Turn(sampler, sampler.courses, canvas, THE_ROW,
                    [Seen(canvas, predict(canvas, [probability, 0.2, 0.1]))])  # fmt: skip
        turn.choose(force=False)
        committed = turn.commit().tolist()
        canvas.step += 1
    assert committed == [0] * stable
