"""Every rule against the exact distribution, and rules with one fault each, which must fail."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dllm.drafting.accept.chains import Block, Ratio, residual, walk
from dllm.drafting.base import Distribution, Draft, Outcome

from ...thin import some
from .. import toy


def matched(rows: toy.TableRows, draft: Draft) -> Outcome:
    """Goes down as long as the verifier draws what was drafted."""
    return walk(draft, lambda node: rows.draw(rows.distribution(node), node))


LOSSLESS: dict[str, tuple[toy.Judge, toy.Make]] = {
    "walk argmax": (matched, toy.argmax),
    "walk top tree": (matched, toy.top_tree),
    "ratio sampled": (Ratio().judge, toy.sampled),
    "block sampled": (Block().judge, toy.sampled),
}
FEW, MANY = 2_500, 60_000


@pytest.mark.parametrize("case", some(LOSSLESS, 2))
def test_the_output_has_the_verifiers_distribution(case: str) -> None:
    assert toy.run(*LOSSLESS[case], FEW).p_value > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("case", LOSSLESS)
def test_the_distribution_holds_with_many_samples(case: str) -> None:
    assert toy.run(*LOSSLESS[case], MANY, seed=7).p_value > 1e-4


def as_sampled(make: toy.Make) -> toy.Make:
    """A draft found by other means, presented as if it were drawn from the marginals."""

    def wrong(target: toy.Target, text: tuple[int, ...], rng: Any) -> Draft:
        q = target.marginals(text, toy.LENGTH)
        return Draft(make(target, text, rng).tokens, None, Distribution.MARGINALS, np.log(q))

    return wrong


def best_of_four(target: toy.Target, text: tuple[int, ...], rng: Any) -> Draft:
    q = target.marginals(text, toy.LENGTH)
    drafts = [toy.sampled(target, text, rng) for _ in range(4)]
    return max(drafts, key=lambda d: float(np.log(q[range(toy.LENGTH), d.tokens]).sum()))


def continued(rows: toy.TableRows, draft: Draft) -> Outcome:
    """Goes on after a rejection with rows of the parallel pass: emits all three tokens."""
    emitted = []
    for node, token in enumerate(draft.tokens.tolist()):
        p, q = rows.distribution(node - 1), draft.q(node - 1)
        kept = rows.coin(node) * q[token] < p[token]
        emitted.append(token if kept else rows.draw(residual(p, q), node))
    draft.tokens[:] = emitted
    return Outcome(list(range(len(emitted))), rows.draw(rows.distribution(len(emitted) - 1), 0))


def uncorrected(rows: toy.TableRows, draft: Draft) -> Outcome:
    """Draws the correction from p instead of the residual."""
    for node, token in enumerate(draft.tokens.tolist()):
        p, q = rows.distribution(node - 1), draft.q(node - 1)
        if rows.coin(node) * q[token] >= p[token]:
            return Outcome(list(range(node)), rows.draw(p, node - 1))
    return Outcome(list(range(len(draft))), rows.draw(rows.distribution(len(draft) - 1), 0))


@pytest.mark.parametrize(
    ("judge", "make"),
    some(
        [
            pytest.param(Ratio().judge, as_sampled(toy.argmax), id="ratio on a searched chain"),
            pytest.param(Ratio().judge, best_of_four, id="ratio on the best of four"),
            pytest.param(continued, toy.sampled, id="continue after a rejection"),
            pytest.param(uncorrected, toy.sampled, id="correction from p"),
        ],
        2,
    ),
)
def test_a_fault_is_noticed(judge: toy.Judge, make: toy.Make) -> None:
    assert toy.run(judge, make, FEW).p_value < 1e-6


@pytest.mark.parametrize(("coins", "kept", "rest"), [
    ((0.16, 0.5), 1, [0.1, 0.0, 0.0]),  # 0.1 / (0.1 + 1 - 0.5) = 1/6; 0.5 p - q
    ((0.17, 0.5), 0, [0.0, 0.1, 0.1]),  # p - q
    ((0.9, 0.083), 2, [0.2, 0.3, 0.5]),  # 0.5 * 0.1 / 0.6 = 1/12, judged last: p
    ((0.9, 0.084), 0, [0.0, 0.1, 0.1]),
    ((0.1, 0.083), 2, [0.2, 0.3, 0.5]),
])  # fmt: skip
def test_a_block_by_hand(coins: tuple[float, float], kept: int, rest: list[float]) -> None:
    """The first token has weight 0.2 / 0.4, what is left of it behind the second is 0.1."""
    p = np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.2, 0.3, 0.5]])
    q = np.array([[0.4, 0.4, 0.2], [0.2, 0.2, 0.6]])
    drawn: list[Any] = []
    rows: Any = SimpleNamespace(
        distribution=lambda node: p[node + 1], coin=lambda node: coins[node],
        draw=lambda distribution, node: drawn.append((distribution, node)) or 1,
    )  # fmt: skip
    draft = Draft(np.array([0, 2]), None, Distribution.MARGINALS, np.log(q))
    assert Block().judge(rows, draft) == Outcome(list(range(kept)), 1)
    ((distribution, node),) = drawn
    assert node == kept - 1
    np.testing.assert_allclose(distribution, rest, atol=1e-12)


def test_block_accepts_no_less_than_ratio() -> None:
    ratio, block = (toy.run(rule.judge, toy.sampled, FEW) for rule in (Ratio(), Block()))
    assert block.tokens_per_round > ratio.tokens_per_round - 0.02


def test_what_is_gained_may_be_less_than_one_can_hold() -> None:
    """1e-20 more than the draft's probability, beside a weight of one."""
    with np.errstate(divide="ignore"):
        q = np.log(np.eye(toy.V)[[0, 0]])
    draft = Draft(np.array([0, 0]), None, Distribution.MARGINALS, q)

    class Nearly(toy.TableRows):
        def distribution(self, node: int) -> np.ndarray:
            return np.array([1.0, 1e-20, 0.0, 0.0, 0.0])

    rows = Nearly(toy.Target(), draft, (), np.random.default_rng(0))
    assert Block().judge(rows, draft) == Outcome([0, 1], 0)


class Watched(toy.TableRows):
    """Keeps the first ``keep`` tokens of a draft, and remembers what is drawn behind them."""

    def __init__(self, keep: int, draft: Draft) -> None:
        super().__init__(toy.Target(3), draft, (), np.random.default_rng(0))
        self.keep, self.drawn = keep, list[tuple[list[float], int]]()

    def coin(self, node: int) -> float:
        return 0.0 if node < self.keep else np.inf

    def draw(self, distribution: np.ndarray, node: int) -> int:
        self.drawn.append((distribution.tolist(), node))
        return 0


@pytest.mark.parametrize("keep", range(toy.LENGTH + 1))
def test_what_is_drawn_behind_the_kept_tokens(keep: int) -> None:
    """Its noise is that of the last kept token; behind a whole draft it is the verifier's."""
    draft = toy.sampled(toy.Target(3), (), np.random.default_rng(1))
    rows = Watched(keep, draft)
    assert Ratio().judge(rows, draft).path == list(range(keep))
    (drawn, node), = rows.drawn  # fmt: skip
    assert node == keep - 1
    if keep == toy.LENGTH:
        assert drawn == rows.distribution(node).tolist()
