"""Explorers against loops that are written out, on a model that depends on every token."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dllm.core.canvas import Canvas
from dllm.core.errors import ConfigError
from dllm.samplers import Feed, Prediction, Seen, Trial, compose
from dllm.samplers.base import NO_SCORES, NOTHING
from dllm.samplers.ete import ETE
from dllm.samplers.lopa import BranchScores
from dllm.samplers.multi_blocks import FirstBlock

from ..table import MASK, Table, hashed
from .test_methods import run
from .test_vectors import canvas_of

PROMPT, MASKS = [1, 2, 3], 16
Branch = tuple[list[int], float]  # tokens, and what it tried
Numbers = dict[int, tuple[int, float, float]]  # position -> token, probability, entropy


def look(table: Table, tokens: list[int]) -> Numbers:
    """What the model says at the masks."""
    logits = np.asarray(table(np.array(tokens), np.arange(len(tokens))), np.float64)
    logits[:, MASK] = -np.inf
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(1)
    masks = [i for i, token in enumerate(tokens) if token == MASK]
    return {i: (int(p[i].argmax()), float(p[i].max()), float(entropy[i])) for i in masks}


def put(tokens: list[int], said: Numbers, positions: list[int]) -> list[int]:
    return [said[i][0] if i in positions else token for i, token in enumerate(tokens)]


def surest(said: Numbers, positions: list[int]) -> list[int]:
    return sorted(positions, key=lambda i: (-said[i][1], i))


def lopa_score(branch: Branch, said: Numbers, alpha: float) -> float:
    unsure = [-entropy for _, _, entropy in said.values()]
    return alpha * branch[1] + (1 - alpha) * (float(np.mean(unsure)) if unsure else 1.0)


def lopa(
    table: Table, tau: float, k: int, alpha: float, base: bool = True
) -> tuple[list[int], int]:
    branches, nfe = [(PROMPT + [MASK] * MASKS, 1.0)], 0
    while True:
        heard = [look(table, tokens) for tokens, _ in branches]
        nfe += 1
        scores = [lopa_score(b, said, alpha) for b, said in zip(branches, heard, strict=True)]
        kept = max(range(len(branches)), key=lambda i: (scores[i], i >= base, -i))
        tokens, said = branches[kept][0], heard[kept]
        chosen = [i for i in said if said[i][1] >= tau] or surest(said, list(said))[:1]
        tokens = put(tokens, said, chosen)
        if MASK not in tokens:
            return tokens, nfe
        rest = surest(said, [i for i in said if i not in chosen])[: k - base]
        branches = [(tokens, 1.0)] * base + [(put(tokens, said, [i]), said[i][1]) for i in rest]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("k", "alpha", "base"), [(2, 0.0, True), (3, 0.0, True), (4, 0.3, True), (3, 0.3, False)]
)
def test_lopa(seed: int, k: int, alpha: float, base: bool) -> None:
    table = hashed(seed, 2.0)
    tokens, nfe = lopa(table, 0.4, k, alpha, base)
    spec = (
        f"lopa(threshold(0.4), k={k}, alpha={alpha}, base_competes={base})+whole"
        "+eos(eos_policy=none)"
    )
    result = run(spec, table, MASKS)
    assert result.tokens.tolist() == tokens
    assert result.nfe == nfe


def ete_rank(branch: Branch, said: Numbers, tau: float) -> tuple[float, ...]:
    p = [probability for _, probability, _ in said.values()]
    return sum(q >= tau for q in p), float(np.mean(np.log(p))) if p else 0.0, branch[1]


def ete(table: Table, tau: float, k: int) -> tuple[list[int], int]:
    branches, nfe = [(PROMPT + [MASK] * MASKS, 0.0)], 0
    while True:
        heard = [look(table, tokens) for tokens, _ in branches]
        nfe += 1
        ranks = [ete_rank(b, said, tau) for b, said in zip(branches, heard, strict=True)]
        kept = ranks.index(max(ranks))
        tokens, said = branches[kept][0], heard[kept]
        if MASK not in tokens:
            return tokens, nfe
        chosen = [i for i in said if said[i][1] >= tau]
        if chosen or len(said) == 1:
            branches = [(put(tokens, said, chosen or list(said)), 0.0)]
            if MASK not in branches[0][0]:
                return branches[0][0], nfe
            continue
        tries = sorted(surest(said, list(said))[:k])
        branches = [(put(tokens, said, [i]), float(np.log(said[i][1]))) for i in tries]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("k", [2, 4])
def test_ete(seed: int, k: int) -> None:
    table = hashed(seed, 2.0)
    tokens, nfe = ete(table, 0.4, k)
    spec = f"ete(k={k}, tau=0.4)+multi_blocks({MASKS}, lookahead=0)+eos(eos_policy=none)"
    result = run(spec, table, MASKS)
    assert result.tokens.tolist() == tokens
    assert result.nfe == nfe


@pytest.mark.parametrize(
    "spec", ["lopa(threshold(0.4), k=3)+blocks(4)", "ete(threshold(0.4), k=3, tau=0.4)"]
)
@pytest.mark.parametrize("region", ["all_masked", "window_masked"])
def test_branches_are_judged_by_their_window_alone(spec: str, region: str) -> None:
    """A Prophet that never fires has the whole region predicted, and changes nothing."""
    never = f"prophet(early=999, mid=999, late=999, region={region})"
    decided = "prophet(early=999, mid=999, late=999, start=0, answer=16)"
    for seed in range(2):
        plain = run(spec, hashed(seed, 2.0), MASKS)
        for more in (never, decided):
            result = run(f"{spec}+{more}", hashed(seed, 2.0), MASKS)
            assert result.tokens.tolist() == plain.tokens.tolist()
            assert result.nfe == plain.nfe


def tried(position: int, p: float) -> Trial:
    return Trial(np.array([position]), np.ones(1, np.int64), np.log(np.array([p], np.float32)))


def forked(canvas: Canvas, trial: Trial) -> Canvas:
    branch = canvas.fork()
    branch.commit(trial.positions, trial.tokens, trial.logprobs)
    return branch


def heard(entropies: list[float]) -> Prediction:
    n = len(entropies)
    zeros = np.zeros(n, np.float32)
    return Prediction(np.arange(n), zeros.astype(np.int64), zeros,
                      entropy=np.array(entropies, np.float32))  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ("", 2),  # the smallest mean entropy
        (", branch_topp=0.5", 1),  # ... of the half that is least sure
        (", alpha=1.0", 0),  # only the trial's own probability: the row that tries nothing wins
        (", alpha=0.5", 1),
    ],
    ids=["future", "least sure half", "creation", "both"],
)
def test_lopa_keeps_the_most_confident_future(rule: str, kept: int) -> None:
    trials = Trial(NOTHING, NOTHING, NO_SCORES), tried(0, 0.9), tried(1, 0.5)

    def keeps(rule: str, futures: list[Prediction]) -> int | None:
        canvas, sampler = canvas_of(4), compose(f"lopa(k=3{rule})+whole+eos(eos_policy=none)")
        sampler.prepare(canvas)
        canvas.state(BranchScores).scores = (1.0, 0.9, 0.5)
        seen = [Seen(forked(canvas, t), p) for t, p in zip(trials, futures, strict=True)]
        return sampler.decide(canvas, Feed(trials), seen).kept

    assert kept == keeps(rule, [
        heard([1.0, 1.0, 1.0, 1.0]),
        heard([9.9, 0.6, 0.6, 0.6]),  # what a branch has decided does not count
        heard([0.1, 9.9, 0.8, 0.8]),
    ])  # fmt: skip
    assert keeps("", [heard([0.5] * 4)] * 3) == 1  # ties go to a trial


@pytest.mark.parametrize(
    ("order", "tried"),
    [("entropy", [0, 2, 3, 4]), ("conf", [1, 2, 4, 5]), ("hybrid", [0, 1, 3, 5])],
)
def test_what_ete_tries(order: str, tried: list[int]) -> None:
    """Four of six: the most uncertain above 0.3, the most confident, or two of each."""
    canvas = canvas_of(6)
    canvas.state(FirstBlock).end = 6
    score = np.array([0.4, 0.8, 0.6, 0.5, 0.65, 0.7], np.float32)
    entropy = np.array([2.0, 0.1, 1.1, 1.5, 1.2, 0.3], np.float32)
    view: Any = SimpleNamespace(
        canvas=canvas, positions=np.arange(6), score=score,
        prediction=SimpleNamespace(entropy=entropy),
    )  # fmt: skip
    masks = ETE(k=4, order=order)._tried(view, np.zeros(6, np.bool_))
    assert [int(mask.argmax()) for mask in masks] == tried


def test_ete_counts_what_is_as_sure_as_tau() -> None:
    """Two of 0.5 come before one that is surer; of as many the surer ones."""
    canvas, at = canvas_of(4), np.arange(4)
    canvas.open_window(0, 4)

    def best(tau: float) -> int:
        rows = ([0.5, 0.5, 0.2, 0.2], [0.9, 0.4, 0.4, 0.4], [0.5, 0.1, 0.1, 0.1])
        seen = [Seen(canvas.fork(), Prediction(at, at, np.log(np.float32(row)))) for row in rows]
        return ETE(tau=tau)._best(SimpleNamespace(seen=seen))  # type: ignore[arg-type]

    half = np.exp(np.log(np.full(4, 0.5, np.float32)))[0]
    assert (best(float(half)), best(float(np.nextafter(half, np.float32(1))))) == (0, 1)


@pytest.mark.parametrize("spec", ["lopa(k=1000000)", "ete(k=257)", "freedave(draft_depth=257)"])
def test_branches_each_of_which_has_keys_and_values_are_few(spec: str) -> None:
    with pytest.raises(ConfigError, match="between 1 and 256"):
        compose(spec)
