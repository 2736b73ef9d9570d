"""Joint completions against every completion there is."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dllm.formats.automaton import Automaton
from dllm.formats.joint import Chain, drawn, likeliest, marginals

from .toy import PATTERNS, SIZE, automaton, sequences, weights

LENGTH = 3


def chain_of(
    built: Automaton, start: int, x: np.ndarray, tokens: np.ndarray, masked: np.ndarray,
    fold: np.ufunc,
) -> Chain:  # fmt: skip
    """The chain of independent positions, of which some are decided."""
    count = built.next.shape[1]
    weight = np.full((len(x), count), -np.inf)
    for c in range(count):
        weight[:, c] = fold.reduce(x[:, built.of == c], axis=1)
    decided = np.where(masked, -1, built.class_of(tokens))
    return Chain(weight, decided, start, built.accepting | built.closed)


def completions(
    built: Automaton, start: int, x: np.ndarray, tokens: np.ndarray, masked: np.ndarray
) -> dict[tuple[int, ...], float]:
    """Every allowed completion and its log-weight."""
    result = {}
    for filled in sequences(LENGTH):
        here = np.array(filled)
        if (here != tokens)[~masked].any():
            continue
        end = built.run(start, here)
        if end >= 0 and (built.accepting | built.closed)[end]:
            result[filled] = float(x[np.arange(LENGTH), here][masked].sum())
    return result


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seed", range(2))
def test_likeliest_and_marginals(pattern: str, seed: int) -> None:
    built, start, _ = automaton(pattern)
    rng = np.random.default_rng(seed)
    x = weights(rng, LENGTH)
    possible = completions(built, start, x, np.zeros(LENGTH, int), np.ones(LENGTH, bool))
    if not possible:
        chain = chain_of(built, start, x, np.zeros(LENGTH, int), np.ones(LENGTH, bool), np.maximum)
        assert likeliest(built, chain) is None and drawn(built, chain, np.full(3, 0.5)) is None
        return
    tokens = np.array(list(possible)[rng.integers(len(possible))])
    masked = rng.random(LENGTH) < 0.8
    left = completions(built, start, x, tokens, masked)
    best = likeliest(built, chain_of(built, start, x, tokens, masked, np.maximum))
    winner = max(left, key=lambda t: left[t])
    assert best is not None and best.tolist() == built.of[list(winner)].tolist()
    sure = marginals(built, chain_of(built, start, x, tokens, masked, np.logaddexp), best)
    total = np.logaddexp.reduce(list(left.values()))
    for i, c in enumerate(best):
        mine = [w for t, w in left.items() if built.of[t[i]] == c]
        assert np.exp(sure[i]) == pytest.approx(
            np.exp(np.logaddexp.reduce(mine) - total), abs=1e-12
        )


@pytest.mark.parametrize("pattern", PATTERNS[:6])
def test_the_law_of_what_is_drawn(pattern: str) -> None:
    built, start, _ = automaton(pattern)
    rng = np.random.default_rng(7)
    x = weights(rng, LENGTH)
    free = np.ones(LENGTH, bool)
    left = completions(built, start, x, np.zeros(LENGTH, int), free)
    if not left:
        pytest.skip("no text is this short")
    chain = chain_of(built, start, x, np.zeros(LENGTH, int), free, np.logaddexp)
    law: dict[tuple[int, ...], float] = {}
    for t, w in left.items():
        path = tuple(built.of[list(t)].tolist())
        law[path] = np.logaddexp(law.get(path, -np.inf), w)
    total = np.logaddexp.reduce(list(law.values()))
    count = 1500
    seen = dict.fromkeys(law, 0)
    for noise in rng.random((count, LENGTH)):
        path = drawn(built, chain, noise)
        assert path is not None
        seen[tuple(path.tolist())] += 1
    expected = np.array([np.exp(w - total) * count for w in law.values()])
    observed = np.array(list(seen.values()))
    large = expected >= 5
    e, o = [*expected[large], expected[~large].sum()], [*observed[large], observed[~large].sum()]
    if e[-1] == 0:
        e, o = e[:-1], o[:-1]
    if len(e) > 1:
        assert stats.chisquare(o, np.array(e) * sum(o) / sum(e)).pvalue > 1e-4


def test_weights_that_float64_cannot_hold_as_probabilities() -> None:
    built, start, _ = automaton("a*")
    length = 400
    weight = np.full((length, built.next.shape[1]), -900.0)
    chain = Chain(weight, np.full(length, -1), start, built.accepting | built.closed)
    path = likeliest(built, chain)
    assert path is not None
    assert np.isfinite(marginals(built, chain, path)).all()
    assert SIZE
