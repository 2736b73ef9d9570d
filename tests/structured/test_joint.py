"""Joint completions against every completion there is."""

import numpy as np
import pytest
from scipy import stats

from dllm.structured.automaton import Automaton
from dllm.structured.joint import Chain, Lattice, Pruned

from ..thin import covering, some
from . import naive
from .toy import PATTERNS, automaton, sequences, weights

LENGTH = 3


def chain_of(
    built: Automaton, start: int, x: np.ndarray, tokens: np.ndarray, masked: np.ndarray
) -> Chain:
    """The chain of independent positions, of which some are decided."""
    each = np.full((2, len(x), built.next.shape[1]), -np.inf)
    for c in range(each.shape[2]):
        each[0, :, c] = x[:, built.of == c].max(axis=1)
        each[1, :, c] = np.logaddexp.reduce(x[:, built.of == c], axis=1)
    decided = np.flatnonzero(~masked)
    each[:, decided] = -np.inf
    each[:, decided, built.class_of(tokens)[decided]] = 0.0
    return Chain(*each, start, built.accepting | built.closed)


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


@pytest.mark.parametrize(("pattern", "seed"), covering(PATTERNS, range(2)))
def test_likeliest_and_marginals(pattern: str, seed: int) -> None:
    built, start, _ = automaton(pattern)
    rng = np.random.default_rng(seed)
    x = weights(rng, LENGTH)
    possible = completions(built, start, x, np.zeros(LENGTH, int), np.ones(LENGTH, bool))
    if not possible:
        chain = chain_of(built, start, x, np.zeros(LENGTH, int), np.ones(LENGTH, bool))
        assert not Lattice(built, [chain]).possible(chain)
        return
    tokens = np.array(list(possible)[rng.integers(len(possible))])
    masked = rng.random(LENGTH) < 0.8
    left = completions(built, start, x, tokens, masked)
    chain = chain_of(built, start, x, tokens, masked)
    lattice = Lattice(built, [chain])
    best = lattice.likeliest(chain)
    winner = max(left, key=lambda t: left[t])
    assert lattice.possible(chain) and best.tolist() == built.of[list(winner)].tolist()
    sure = lattice.marginals(chain, best)
    total = np.logaddexp.reduce(list(left.values()))
    for i, c in enumerate(best):
        mine = [w for t, w in left.items() if built.of[t[i]] == c]
        assert np.exp(sure[i]) == pytest.approx(
            np.exp(np.logaddexp.reduce(mine) - total), abs=1e-12
        )


@pytest.mark.parametrize("pattern", some(PATTERNS[:6], 2))
def test_the_law_of_what_is_drawn(pattern: str) -> None:
    built, start, _ = automaton(pattern)
    rng = np.random.default_rng(7)
    x = weights(rng, LENGTH)
    free = np.ones(LENGTH, bool)
    left = completions(built, start, x, np.zeros(LENGTH, int), free)
    if not left:
        pytest.skip("no text is this short")
    chain = chain_of(built, start, x, np.zeros(LENGTH, int), free)
    law: dict[tuple[int, ...], float] = {}
    for t, w in left.items():
        path = tuple(built.of[list(t)].tolist())
        law[path] = np.logaddexp(law.get(path, -np.inf), w)
    total = np.logaddexp.reduce(list(law.values()))
    count = 1500
    seen = dict.fromkeys(law, 0)
    lattice = Lattice(built, [chain])
    for noise in rng.random((count, LENGTH)):
        seen[tuple(lattice.drawn(chain, noise).tolist())] += 1
    expected = np.array([np.exp(w - total) * count for w in law.values()])
    observed = np.array(list(seen.values()))
    large = expected >= 5
    e, o = [*expected[large], expected[~large].sum()], [*observed[large], observed[~large].sum()]
    if e[-1] == 0:
        e, o = e[:-1], o[:-1]
    if len(e) > 1:
        assert stats.chisquare(o, np.array(e) * sum(o) / sum(e)).pvalue > 1e-4


@pytest.mark.parametrize("pattern", PATTERNS)
def test_long_texts_as_the_formulas_read(pattern: str) -> None:
    """Sharp and dull predictions, some of them impossible, in texts of which some is decided."""
    built, start, _ = automaton(pattern)
    rng = np.random.default_rng(11)
    for scale in (0.1, 3.0, 300.0):
        best = rng.normal(size=(20, built.next.shape[1])) * scale
        best[rng.random(best.shape) < 0.1] = -np.inf
        law = best + rng.random(best.shape) * 10  # a class holds more than its likeliest token
        chain = Chain(best, law, start, built.accepting | built.closed)
        lattice = Lattice(built, [chain])
        ahead = naive.backward(built, chain.weight, chain.final, max)
        assert lattice.possible(chain) == (ahead[0, start] > -np.inf)
        if lattice.possible(chain):
            path = lattice.likeliest(chain)
            assert path.tolist() == naive.likeliest(built, chain).tolist()
            found, wanted = lattice.marginals(chain, path), naive.marginals(built, chain, path)
            assert np.exp(found) == pytest.approx(np.exp(wanted), abs=1e-11)


def test_a_chain_does_not_depend_on_its_neighbours() -> None:
    built, start, _ = automaton(PATTERNS[1])
    rng = np.random.default_rng(5)
    chains = [
        Chain(x := rng.normal(size=(length, built.next.shape[1])) * 2, x, start, built.accepting)
        for length in (4, 31, 8, 17)
    ]
    together = Lattice(built, chains)
    for chain in chains:
        alone, noise = Lattice(built, [chain]), rng.random(len(chain.weight))
        path = alone.likeliest(chain)
        assert np.array_equal(together.likeliest(chain), path)
        assert np.array_equal(together.drawn(chain, noise), alone.drawn(chain, noise))
        assert np.array_equal(together.marginals(chain, path), alone.marginals(chain, path))


def test_weights_that_float64_cannot_hold_as_probabilities() -> None:
    built, start, _ = automaton("a*")
    weight = np.full((400, built.next.shape[1]), -900.0)
    chain = Chain(weight, weight, start, built.accepting | built.closed)
    lattice = Lattice(built, [chain])
    assert np.isfinite(lattice.marginals(chain, lattice.likeliest(chain))).all()


@pytest.mark.parametrize("kept", some([4, 1000, 2], 2))
def test_through_the_likeliest_states_only(kept: int) -> None:
    """What is certain is the likeliest, what is whole is exact; whatever is found is allowed."""
    certain = 0
    for pattern, seed in [(p, s) for p in PATTERNS for s in range(6)]:
        built, start, _ = automaton(pattern)
        rng = np.random.default_rng(seed)
        x = weights(rng, LENGTH)
        tokens, masked = rng.integers(0, built.next.shape[1], LENGTH), rng.random(LENGTH) < 0.8
        chain = chain_of(built, start, x, np.zeros(LENGTH, int), np.ones(LENGTH, bool))
        exact = Lattice(built, [chain])
        if not exact.possible(chain):
            continue
        first = exact.likeliest(chain)
        chain.weight[~masked] = np.where(  # some are decided, as the likeliest has them
            np.arange(built.next.shape[1]) == first[~masked, None], 0.0, -np.inf
        )
        chain.law[~masked] = chain.weight[~masked]
        exact, pruned = Lattice(built, [chain]), Pruned(built, chain, kept)
        assert pruned.possible(chain), (pattern, seed, tokens)
        path = pruned.likeliest(chain)
        state = start
        for label in path.tolist():
            state = int(built.next[state, label])
            assert state >= 0
        assert chain.final[state]
        best = exact.best[0, 0, start]
        assert pruned.best[0, 0, start] <= best + 1e-12
        certain += pruned.certain
        if pruned.certain:
            assert pruned.best[0, 0, start] == pytest.approx(best, abs=1e-12)
        if pruned.whole:
            mine, wanted = (each.marginals(chain, path) for each in (pruned, exact))
            assert mine == pytest.approx(wanted, abs=1e-9)
            noise = rng.random(LENGTH)
            assert (pruned.drawn(chain, noise) == exact.drawn(chain, noise)).all()
        assert kept < 1000 or pruned.whole
    assert certain > 6
