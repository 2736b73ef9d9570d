"""Heads that look at the token before, and the chains and trees that they walk."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.core.errors import ConfigError
from dllm.drafting.base import Budget
from dllm.drafting.dflash.checkpoint import BlockCheckpoint
from dllm.drafting.dflash.drafter import BlockDrafter
from dllm.drafting.dflash.heads import MarkovHead, SelectorHead
from dllm.drafting.dflash.walks import Walk, candidates
from dllm.drafting.drafters.followers import Followers
from dllm.drafting.length.control import LengthController

from ...thin import some
from ..conftest import prompts
from .conftest import spy, write

# One worker trains the drafter that they share.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("dflash")]


def test_a_markov_head_adds_a_bias_for_the_token_before() -> None:
    torch.manual_seed(0)
    first, second, hidden = torch.randn(6, 3), torch.randn(6, 3), torch.randn(2, 4)
    every = torch.arange(6).expand(2, -1)
    for row in range(2):
        plain = MarkovHead(first.numpy(), second).over(hidden, every)(2, row)
        expected = [sum(second[v, r] * first[2, r] for r in range(3)) for v in range(6)]
        torch.testing.assert_close(torch.from_numpy(plain), torch.stack(expected))


def test_a_selector_chooses_among_the_most_probable() -> None:
    torch.manual_seed(0)
    before, successor, project = torch.randn(6, 3), torch.randn(6, 3), torch.randn(3, 4)
    hidden, logits = torch.randn(1, 4), torch.tensor([[5.0, 4.0, 0.0, 4.5, 1.0, -3.0]])
    _, at = candidates(logits)
    assert at[0].tolist() == [0, 3, 1, 4, 2, 5]
    bias = SelectorHead(before.numpy(), successor, project, top=3).over(hidden, at)(1, 0)
    assert np.isinf(bias).tolist() == [False] * 3 + [True] * 3
    for place, token in enumerate((0, 3, 1)):
        score = (before[1] * (project @ hidden[0])) @ successor[token]
        assert bias[place] == pytest.approx(float(score), rel=1e-5)


@pytest.mark.parametrize("part", some(["selector", "markov"], 1))
def test_a_walk_follows_its_head_and_leaves_the_text_alone(
    verifier: dllm.DiffusionModel, checkpoint: BlockCheckpoint, tmp_path: Path, part: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A head that wants the successor of every token outweighs everything: drafts count up."""
    size = verifier.facts.vocab_size
    monkeypatch.setattr("dllm.drafting.dflash.walks.CANDIDATES", size)
    eye = torch.eye(size)
    heads: dict[str, Any] = {"markov": {
        "markov_w1.weight": eye, "markov_w2.weight": 1e4 * eye.roll(1, 0),
    }}  # fmt: skip
    if part == "selector":
        heads = {"selector": {
            "predecessor_codebook": torch.ones(size, 1), "successor_codebook": torch.zeros(size, 1),
            "hidden_projection.weight": torch.zeros(1, 32),
        }}  # fmt: skip
    whole = BlockCheckpoint("w", checkpoint.config, checkpoint.weights, **heads)
    write(whole, verifier, tmp_path, "native")
    with pytest.raises(ConfigError, match="Markov head or selector"):
        BlockDrafter(checkpoint, head="tree")
    for ids in prompts(1):
        plain = dllm.speculate(verifier, None, ids, max_new_tokens=12)
        tree = dllm.speculate(
            verifier, str(tmp_path), ids, max_new_tokens=12, controller="full", head="tree",
            nodes=6, ngram_candidates=False,
        )  # fmt: skip
        assert tree.tokens == plain.tokens
        assert max(stats.drafted for stats in tree.rounds) == 6
        few = dllm.speculate(
            verifier, str(tmp_path), ids, max_new_tokens=12, controller=TwoNodes(), head="tree",
            nodes=6,
        )  # fmt: skip
        assert few.tokens == plain.tokens
        assert max(stats.drafted for stats in few.rounds) == 2
        # By default a controller that prices nodes gets a tree, and others a chain.
        for head, nodes in (("auto", 2), ("chain", checkpoint.config.block_size - 1)):
            chosen = dllm.speculate(
                verifier, str(tmp_path), ids, max_new_tokens=12, controller=TwoNodes(), head=head,
                ngram_candidates=False,
            )  # fmt: skip
            assert chosen.tokens == plain.tokens
            assert max(stats.drafted for stats in chosen.rounds) == nodes
    drafter = BlockDrafter(tmp_path, ngram_candidates=False)
    for temperature in (0.0, 0.8):
        how: dict[str, Any] = {"max_new_tokens": 20, "temperature": temperature, "seed": 1}
        for ids in prompts(1):
            seen = spy(drafter)
            plain = dllm.speculate(verifier, None, ids, **how)
            result = dllm.speculate(verifier, drafter, ids, controller="full", **how)
            assert result.tokens == plain.tokens
            if part == "markov":
                steps = np.diff(np.asarray(seen)) % size
                assert len(seen) > 20 and (steps == 1).mean() > 0.7


@pytest.mark.parametrize(
    ("head", "temperature"), some([("tree", 0.8), ("tree", 0.0), ("chain", 0.0)], 1)
)
def test_copies_of_the_text_join_the_draft(
    verifier: dllm.DiffusionModel, checkpoint: BlockCheckpoint, tmp_path: Path, head: str,
    temperature: float,
) -> None:  # fmt: skip
    """A prompt of nine tokens over and over: a head that knows nothing drafts beyond its block,
    because the text does; and no text is changed by that, alone or in a batch."""
    zeros = {"markov_w1.weight": torch.zeros(verifier.facts.vocab_size, 2)}
    zeros["markov_w2.weight"] = torch.zeros(verifier.facts.vocab_size, 2)
    write(BlockCheckpoint("w", checkpoint.config, checkpoint.weights, markov=zeros), verifier,
          tmp_path, "native")  # fmt: skip
    texts = [np.tile(ids[:9], 4) for ids in prompts(3)]
    how: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": 2}
    plain = dllm.speculate(verifier, None, texts, **how)
    for controller in ("full", "adaptive"):
        drafter = BlockDrafter(tmp_path, head=head, nodes=20)
        drafted = dllm.speculate(verifier, drafter, texts, controller=controller, **how)
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]
        depth = max(stats.depth for one in drafted for stats in one.rounds)
        assert depth > checkpoint.config.block_size - 1 or controller == "adaptive"
        assert drafter.hits[temperature > 0]._judged and not drafter.hits[temperature == 0]._judged


def test_followers_are_those_of_the_text() -> None:
    """Against counting by hand; learnt at once and in pieces."""
    text = np.array([1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2])
    whole, pieces = Followers((1, 2, 3)), Followers((1, 2, 3))
    whole.learn(text)
    for end in (1, 2, 5, 9, 12):
        pieces.learn(text[:end])
    assert whole.counts == pieces.counts
    assert whole.latest([5, 1, 2], 3) == {3: (2, 0), 4: (2, 1)}
    assert whole.latest([9, 3], 1) == {5: (1, 0)}
    assert whole.latest([9], 3) == {}


class TwoNodes(LengthController):
    """Finds two nodes of a tree worth their time."""

    def next(self, room: int, context: int) -> Budget:
        return Budget(room, room, nodes=lambda alive: 2)


def test_a_tree_holds_the_most_probable_prefixes() -> None:
    """Against all paths of a small vocabulary."""
    torch.manual_seed(0)
    head = MarkovHead(torch.randn(5, 3).numpy(), torch.randn(5, 3))
    logits, every = torch.randn(3, 5), torch.arange(5).expand(3, -1)
    bias = head.over(torch.zeros(3, 4), every)
    values, at = candidates(logits)
    walk = Walk(head.over(torch.zeros(3, 4), at), 2, values.numpy(), at.numpy())
    scores = {}
    for length in (1, 2, 3):
        for path in itertools.product(range(5), repeat=length):
            steps = zip((2, *path), path, strict=False)
            rows = [(logits[i] + torch.from_numpy(bias(a, i))).log_softmax(-1)[b]
                    for i, (a, b) in enumerate(steps)]  # fmt: skip
            scores[path] = float(sum(rows))
    expected = sorted(scores, key=lambda path: -scores[path])[:9]
    draft = walk.grow(3, 9)
    got: list[tuple[int, ...]] = []
    for node in draft:
        got.append((*(() if node.parent < 0 else got[node.parent]), node.token))
    assert got == expected
    alive = [node.alive for node in draft]
    np.testing.assert_allclose(alive, [np.exp(scores[path]) for path in expected], rtol=1e-5)
    few = walk.grow(3, 60, size=lambda alive: int((alive > 0.04).sum()))
    many = walk.grow(3, 60)
    sent = sum(node.alive > 0.04 for node in many)
    assert 4 < sent <= len(few) <= sent + 4 < len(many)  # no more than is sent
    assert [n.token for n in few] == [n.token for n in many[: len(few)]]
    chain = walk.grow(3, 3, branches=False)
    best: tuple[int, ...] = ()
    for _ in range(3):
        best = max((p for p in scores if p[:-1] == best), key=lambda path: scores[path])
    assert tuple(node.token for node in chain) == best
