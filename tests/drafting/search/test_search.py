"""Lattice and searches on hand-made marginals, against exhaustive search."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.drafting import register_all
from dllm.drafting.base import ROOT, Distribution
from dllm.drafting.search.best_first_tree import BestFirstTree
from dllm.drafting.search.chains import SEARCHES, Argmax, Coupled, Sample, Search, SearchContext
from dllm.drafting.search.grow import grow
from dllm.drafting.search.marginals import NARROW, Lattice, Marginals, largest
from dllm.drafting.search.paths import CausalPathSearch, beam_search
from dllm.drafting.search.proxies import NGram
from dllm.kernels.noise import gumbel

END = 4


def marginals(
    rows: list[list[float]], stop: tuple[int, ...] = (END,), first: int = 10
) -> Marginals:
    p = torch.tensor(rows, dtype=torch.float64)
    return Marginals((p / p.sum(1, keepdim=True)).log().float(), first, stop)


def random_marginals(
    depth: int, width: int, seed: int, stop: tuple[int, ...] = (), sharp: float = 1.0
) -> Marginals:
    rows = np.random.default_rng(seed).dirichlet(np.full(width, sharp), depth)
    return marginals(rows.tolist(), stop)


class Uniform(NGram):
    """No opinion."""

    def start(self, prefix: Any) -> Any:
        return None

    def logprobs(self, state: Any, tokens: Any) -> list[float]:
        return [0.0] * len(tokens)

    def advance(self, state: Any, token: int) -> Any:
        return None


def context(proxy: NGram | None = None, **more: object) -> SearchContext:
    return SearchContext(np.array([1, 2, 3]), proxy or Uniform(), **more)  # type: ignore[arg-type]


def chain_logprob(proxy: Any, prefix: Any, tokens: Any) -> float:
    """The proxy's log-probability of a chain."""
    state, total = proxy.start(prefix), 0.0
    for token in tokens:
        total += proxy.logprobs(state, [token])[0]
        state = proxy.advance(state, token)
    return total


def fitted(proxy: NGram, texts: list[list[int]]) -> NGram:
    for text in texts:
        proxy.learn(text, len(text))
    return proxy


def trained() -> NGram:
    rng = np.random.default_rng(3)
    return fitted(NGram(vocab_size=5), rng.integers(0, 5, (20, 12)).tolist())


def test_a_column_has_the_fewest_tokens_that_reach_the_mass() -> None:
    m = marginals([[0.5, 0.3, 0.15, 0.04, 0.01], [0.2, 0.2, 0.3, 0.2, 0.1]])
    lattice = m.lattice(2, mass=0.8, cap=15)
    assert [c.token for c in lattice.columns[0]] == [0, 1, END]
    assert [c.token for c in lattice.columns[1]] == [2, 0, 1, 3, END]  # equals by id
    assert math.isclose(lattice.columns[0][0].logp, math.log(0.5), rel_tol=1e-5)


def test_the_cap_bounds_a_column_and_an_end_token_is_kept_beside_it() -> None:
    m = marginals([[0.3, 0.3, 0.2, 0.15, 0.05]])
    assert [c.token for c in m.lattice(1, mass=1.0, cap=2).columns[0]] == [0, 1, END]


def test_only_a_most_probable_end_cuts() -> None:
    sure, end = [0.6, 0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1, 0.6]
    m = marginals([sure, sure, end, sure])
    assert m.end == 2
    assert len(m.lattice(4).columns) == 3
    assert len(m.lattice(2).columns) == 2
    assert marginals([sure] * 3).end is None


def test_bans_come_before_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0, 2.0, 9.0, 7.0]])
    m = Marginals.from_logits(logits, 3, vocab_size=5, banned=[2, 100], temperature=2.0)
    p = m.log_q.exp()[0]
    assert p.shape == (5,)  # the sixth id is beyond the verifier's vocabulary
    assert p[2] == 0
    assert torch.isclose(p.sum(), torch.tensor(1.0))
    assert torch.isclose(m.log_q[0, 4] - m.log_q[0, 1], torch.tensor(4.0))  # (9 - 1) / 2
    wider = Marginals.from_logits(logits, 3, vocab_size=8, banned=[2])
    assert wider.log_q.exp()[0, 6:].tolist() == [0, 0]


def brute_force(lattice: Lattice, proxy: NGram, weight: float) -> tuple[float, tuple[int, ...]]:
    """Best score over all paths; after an end token a path adds the columns' end terms."""
    best: tuple[float, tuple[int, ...]] = (-math.inf, ())
    tokens = [[c.token for c in column] for column in lattice.columns]
    logp = [{c.token: c.logp for c in column} for column in lattice.columns]
    for path in itertools.product(*tokens):
        score, done, kept = 0.0, False, 0
        for depth, token in enumerate(path):
            if done:
                score += weight * lattice.end_logp[depth]
                continue
            prefix = [1, 2, 3, *path[:depth]]
            causal = chain_logprob(proxy, prefix, [token]) if weight < 1 else 0.0
            score += weight * logp[depth][token] + (1 - weight) * causal
            kept, done = depth + 1, token in lattice.stop_ids
        best = max(best, (score, tuple(-t for t in path[:kept])))  # lower ids win ties
    return best[0], tuple(-t for t in best[1])


@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("seed", range(6))
def test_an_unlimited_beam_is_exhaustive_search(seed: int, weight: float) -> None:
    for stop in ((), (END,)):
        lattice = random_marginals(4, 5, seed, stop).lattice(4, mass=1.0)
        result = beam_search(lattice, [1, 2, 3], trained(), weight, beam=10**6)
        score, tokens = brute_force(lattice, trained(), weight)
        assert result.tokens == tokens
        assert math.isclose(result.score, score, abs_tol=1e-5)


def test_an_improbable_end_does_not_win_by_being_short() -> None:
    """Thirty positions, an end token of probability 0.01 at each: a plain sum would often stop."""
    early = 0
    for seed in range(20):
        rows = np.random.default_rng(seed).dirichlet(np.full(14, 1.0), 30) * 0.99
        m = marginals(np.hstack([rows, np.full((30, 1), 0.01)]).tolist(), stop=(14,))
        early += len(CausalPathSearch(weight=1.0, mass=0.99).find(m, 30, context())) < 30
    assert early <= 1


def test_a_certain_end_costs_nothing() -> None:
    rows = [[0.9, 0.05, 0.03, 0.01, 0.01]] * 2 + [[0.001, 0.001, 0.001, 0.001, 0.996]] * 3
    draft = CausalPathSearch().find(marginals(rows), 5, context())
    assert draft.tokens.tolist() == [0, 0, END]
    assert draft.end == 2


def test_the_proxy_repairs_an_order_the_marginals_cannot_know() -> None:
    proxy = fitted(NGram(n=2, vocab_size=5, kappa=0.1), [[0, 1, 0, 1, 2, 3, 2, 3]] * 5)
    m = marginals([[0.5, 0.0, 0.5, 0.0, 0.0], [0.0, 0.45, 0.0, 0.55, 0.0]], stop=())
    assert Argmax().find(m, 2, context()).tokens.tolist() == [0, 3]
    result = CausalPathSearch().find(m, 2, SearchContext(np.array([1]), proxy))
    assert result.tokens.tolist() in ([0, 1], [2, 3])


def test_an_ngram_is_a_distribution_and_learns() -> None:
    proxy = trained()
    state = proxy.start([4, 0])
    assert math.isclose(sum(math.exp(x) for x in proxy.logprobs(state, range(5))), 1.0)
    before = proxy.logprobs(proxy.start([3, 3]), [1])[0]
    proxy.learn([0, 3, 3, 1], fresh=1)
    assert proxy.logprobs(proxy.start([3, 3]), [1])[0] > before
    assert proxy.advance(proxy.start([1, 2]), 3) == proxy.start([1, 2, 3])


def best_prefixes(lattice: Lattice, nodes: int) -> float:
    """Largest sum of prefix probabilities over all sets of ``nodes`` prefixes: the top ones."""
    result = []
    for depth in range(1, len(lattice.columns) + 1):
        for path in itertools.product(*lattice.columns[:depth]):
            ended = [c.token in lattice.stop_ids for c in path[:-1]]
            if not any(ended):
                result.append(math.exp(sum(c.logp for c in path)))
    return sum(sorted(result, reverse=True)[:nodes])


@pytest.mark.parametrize("stop", [(), (END,)])
@pytest.mark.parametrize("nodes", [1, 4, 9, 25])
def test_the_tree_holds_the_most_probable_prefixes(nodes: int, stop: tuple[int, ...]) -> None:
    for seed in range(5):
        m = random_marginals(4, 5, seed, stop)
        draft = BestFirstTree(nodes=nodes).find(m, 4, context())
        assert draft.parents is not None
        assert all(p == ROOT or p < i for i, p in enumerate(draft.parents.tolist()))
        log_q = m.log_q.double().numpy()
        total = 0.0
        for node in range(len(draft)):
            path = draft.tokens[draft.path(node)]
            total += math.exp(log_q[range(len(path)), path].sum())
        assert math.isclose(total, best_prefixes(m.lattice(4, mass=1.0), nodes), rel_tol=1e-5)


def test_of_equal_prefixes_the_first_found_comes_first() -> None:
    """Logarithms are equal when nine digits of them are; ``length`` 2 are two tokens in a path."""
    below = {-1: [(-1.0, 1), (-1.0 + 4e-10, 2), (-1.0 + 2e-9, 3)], 0: [(-1.0, 4)]}
    tree = grow(lambda node: [(*pair, None) for pair in below[node.depth]], 5, 2)
    assert [(node.token, node.parent) for node in tree] == [
        (3, ROOT), (1, ROOT), (2, ROOT), (4, 0), (4, 1)
    ]  # fmt: skip
    assert tree[1].score == -1.0
    two = grow(lambda node: [(0.0, 1, None)], 5, 3, enough=lambda tree, best: len(tree) == 2)
    assert len(two) == 2 and len(grow(lambda node: [(0.0, 1, None)], 5, 3)) == 3


def test_coupled_tokens_carry_the_verifiers_noise() -> None:
    m = random_marginals(6, 5, 0)
    result = Coupled().find(m, 6, context(temperature=1.0, noise_key=(7, 4)))
    noise = gumbel(7, 4, np.arange(10, 16)[:, None], 0, np.arange(5)[None])
    assert result.tokens.tolist() == (m.log_q.numpy() + noise).argmax(1).tolist()
    assert Coupled().find(m, 6, context()).tokens.tolist() == m.argmax.tolist()


def test_samples_have_their_marginals() -> None:
    m = random_marginals(3, 5, 2)
    counts = np.zeros((3, 5))
    for round_ in range(600):
        draft = Sample().find(m, 3, context(temperature=1.0, round=round_))
        counts[range(3), draft.tokens] += 1
    assert draft.distribution is Distribution.MARGINALS
    assert np.abs(counts / 600 - m.log_q.exp().numpy()).max() < 0.08
    assert np.allclose(draft.q(0), m.log_q[1].exp())


@pytest.mark.parametrize("width", [40, 300, NARROW, NARROW + 1, 49_152])
@pytest.mark.parametrize("n", [1, 15, 40])
def test_the_largest_of_a_row_however_wide(width: int, n: int) -> None:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(width))
    for most in (n, width // 2):
        values, at = largest(x, most)
        expected, where = x.topk(most)
        assert torch.equal(values.sort(descending=True).values, expected)
        assert torch.equal(at.sort().values, where.sort().values)


def test_every_search_keeps_to_the_length() -> None:
    register_all()
    m = random_marginals(8, 5, 0, sharp=0.5)
    for name in SEARCHES:
        search: Search = SEARCHES[name]()
        for length in (1, 3):
            draft = search.find(m, length, context(trained(), temperature=1.0))
            deepest = max(draft.depth(node) for node in range(len(draft)))
            assert 0 <= deepest < length, name
            assert draft.confidence is not None
            assert len(draft.confidence) == len(draft)


@pytest.mark.parametrize(
    "search",
    ["cps(weight=0)", "cps(beam=0)", "cps(mass=1.5)"],
)
def test_searches_refuse_what_they_cannot_do(search: str) -> None:
    with pytest.raises(dllm.DllmError, match="takes"):
        dllm.DiffusionDrafter("nano", search=search)
