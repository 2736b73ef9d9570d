"""A vocabulary of five, a random target with memory, and drafts of every distribution: exact
statistics.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dllm.drafting.accept.rows import Rows
from dllm.drafting.base import ROOT, Distribution, Draft, Outcome

V, LENGTH = 5, 3


class Target:
    """p(v | last three tokens), and marginals of the next three mixed with 30 % uniform."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.table = rng.dirichlet(np.full(V, 0.6), size=(V + 1,) * 3)
        self._known: dict[tuple[tuple[int, ...], int], np.ndarray] = {}
        self.joint = np.zeros((V,) * LENGTH)
        for path in itertools.product(range(V), repeat=LENGTH):
            p = 1.0
            for i in range(LENGTH):
                p *= self.distribution(path[:i])[path[i]]
            self.joint[path] = p

    def distribution(self, history: tuple[int, ...]) -> np.ndarray:
        return self.table[((V,) * 3 + tuple(history))[-3:]].copy()

    def marginals(self, history: tuple[int, ...], k: int) -> np.ndarray:
        """(k, V): exact marginals of the next k tokens after ``history``, blurred."""
        key = (history[-3:], k)
        if key not in self._known:
            self._known[key] = self._marginals(history, k)
        return self._known[key]

    def _marginals(self, history: tuple[int, ...], k: int) -> np.ndarray:
        result = np.zeros((k, V))
        alive = {(): 1.0}
        for i in range(k):
            grown: dict[tuple[int, ...], float] = {}
            for path, mass in alive.items():
                for v, p in enumerate(self.distribution((*history, *path))):
                    result[i, v] += mass * p
                    grown[(*path, v)] = mass * p
            alive = grown
        return 0.7 * result + 0.3 / V


class Coins(Rows):
    """Coins from a NumPy generator, because thousands are needed."""

    rng: Any

    def coin(self, node: int) -> float:
        return float(self.rng.random())

    def draw(self, distribution: np.ndarray, node: int) -> int:
        total = distribution.cumsum()
        result = int(np.searchsorted(total, self.rng.random() * total[-1], "right"))
        return min(result, int(np.flatnonzero(distribution)[-1]))


class TableRows(Coins):
    """Rows of the toy target."""

    def __init__(
        self, target: Target, draft: Draft, history: tuple[int, ...], rng: Any, number: int = 0
    ) -> None:
        self.target, self.draft, self.history, self.rng = target, draft, history, rng

    def distribution(self, node: int) -> np.ndarray:
        tokens = self.draft.tokens[self.draft.path(node)].tolist() if node >= 0 else ()
        return self.target.distribution((*self.history, *tokens))


Judge = Callable[[Any, Draft], Outcome]
Make = Callable[[Target, tuple[int, ...], Any], Draft]


@dataclass(frozen=True)
class Found:
    p_value: float
    tokens_per_round: float


def run(
    judge: Judge, make: Make, n: int, seed: int = 0, rows: Callable[..., Rows] = TableRows,
    joint: np.ndarray | None = None, draws: int | None = None,
) -> Found:  # fmt: skip
    """``n`` outputs of three tokens, by as many rounds as it takes, against the exact ``joint``."""
    target, rng = Target(seed), np.random.default_rng(seed + 1 if draws is None else draws)
    joint = target.joint if joint is None else joint
    counts, rounds, emitted_in_all = np.zeros((V,) * LENGTH), 0, 0
    for number in range(n):
        text: tuple[int, ...] = ()
        while len(text) < LENGTH:
            draft = make(target, text, rng)
            outcome = judge(rows(target, draft, text, rng, number), draft)
            emitted = (*draft.tokens[outcome.path].tolist(), outcome.extra)
            text += emitted
            rounds += 1
            emitted_in_all += len(emitted)
        counts[text[:LENGTH]] += 1
    p_value = 0.0 if counts[joint == 0].any() else chi_square(counts.ravel(), joint.ravel() * n)
    return Found(p_value, emitted_in_all / rounds)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """p-value, cells with fewer than five expected pooled."""
    from scipy import stats  # half a second, of the worker that has these tests

    small = expected < 5
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected).pvalue)


def choose(rng: Any, distribution: np.ndarray) -> int:
    return min(int(np.searchsorted(distribution.cumsum(), rng.random(), "right")), V - 1)


def sampled(target: Target, text: tuple[int, ...], rng: Any) -> Draft:
    """Independent draws from the marginals."""
    q = target.marginals(text, LENGTH)
    tokens = np.array([choose(rng, row) for row in q])
    return Draft(tokens, None, Distribution.MARGINALS, np.log(q))


def argmax(target: Target, text: tuple[int, ...], rng: Any) -> Draft:
    return Draft(target.marginals(text, LENGTH).argmax(1))


def tree(target: Target, text: tuple[int, ...], rng: Any) -> Draft:
    """Children without replacement from the marginals, 2-2-1."""
    q = target.marginals(text, LENGTH)
    tokens: list[int] = []
    parents: list[int] = []
    level = [ROOT]
    for depth, width in enumerate((2, 2, 1)):
        below = []
        for node in level:
            noisy = np.log(q[depth]) - np.log(-np.log(rng.random(V)))
            for token in np.argsort(-noisy)[:width]:
                below.append(len(tokens))
                tokens.append(int(token))
                parents.append(node)
        level = below
    return Draft(np.array(tokens), np.array(parents), Distribution.MARGINALS, np.log(q))


def top_tree(target: Target, text: tuple[int, ...], rng: Any) -> Draft:
    """The two most probable tokens of each marginal below each other: deterministic."""
    q = target.marginals(text, LENGTH)
    tokens: list[int] = []
    parents: list[int] = []
    level = [ROOT]
    for row in q:
        below = []
        for node in level:
            for token in np.argsort(-row)[:2]:
                below.append(len(tokens))
                tokens.append(int(token))
                parents.append(node)
        level = below
    return Draft(np.array(tokens), np.array(parents))
