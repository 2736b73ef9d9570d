"""What verifiers promise in bfloat16, with compiled kernels."""

import numpy as np
import pytest
import torch

from dllm.drafting.base import Draft, chain
from dllm.drafting.verifiers import packed
from dllm.drafting.verifiers.packed import PackedVerifier, open_verifier
from dllm.engine.visibility import Visibility
from dllm.kernels.cpu.products import Weight
from dllm.kernels.linear import packed_of
from dllm.models.quantisation import quantise, read

from ..drafting.verifiers.test_exact import SIZE, network, one_by_one
from ..thin import some

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize(("begun", "long", "nodes"), some([(40, 200, 9), (150, 1100, 24)], 1))
def test_chains_and_trees_do_not_change_a_bit(begun: int, long: int, nodes: int) -> None:
    """A chain against its tokens one by one, a path of a tree against its chain."""
    model, rng = network(), np.random.default_rng(0)
    ids, tokens = rng.integers(0, SIZE, begun + nodes), rng.integers(0, SIZE, nodes)
    parents = np.array([int(rng.integers(max(-1, i - 6), i)) for i in range(nodes)])
    verifier = open_verifier(model)
    along = verifier.score([(verifier.open(ids[:begun], 200), chain(ids[begun:]))])[0].logits
    assert torch.equal(along, one_by_one(model, ids, begun))
    tree, ids = Draft(tokens, parents), rng.integers(0, SIZE, long)
    rows = verifier.score([(verifier.open(ids, 1200), tree)])[0].logits
    for leaf in sorted(set(range(nodes)) - set(parents.tolist())):
        path, text = tree.path(leaf), verifier.open(ids, 1200)
        alone = verifier.score([(text, chain(tokens[path]))])[0].logits
        assert torch.equal(alone, rows[[0, *(node + 1 for node in path)]])
        verifier.close(text)
    layer = model.hf.model.layers[0].mlp.up_proj
    with torch.inference_mode():
        assert isinstance(packed_of(layer).parts(layer.weight)[0], Weight)  # compiled, all of it


@pytest.mark.parametrize("way", ["int8", "int4(group=32)"])
def test_weights_of_whole_numbers_are_verified_in_one_forward(way: str) -> None:
    """A row alone, as in plain decoding, against many; no rows are added to it."""
    model, ids = network(), np.random.default_rng(0).integers(0, SIZE, 30)
    quantise(model.hf, read(way))
    verifier = open_verifier(model)
    assert isinstance(verifier, PackedVerifier) and verifier.least == 1
    along = verifier.score([(verifier.open(ids[:20], 200), chain(ids[20:]))])[0].logits
    assert torch.equal(along, one_by_one(model, ids, 20))
    for part in (model.hf.model.layers[1].mlp, model.hf.lm_head):  # now PyTorch calls it
        hook = part.register_forward_hook(lambda *_: None)
        assert PackedVerifier(model).least == 4
        hook.remove()
    assert PackedVerifier(model).least == 1


@pytest.mark.parametrize("way", ["int8", "int4(group=32)"])
def test_a_packed_forward_that_sees_too_much_is_noticed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rows are rounded, and numbers differ more than elsewhere."""
    model = network()
    quantise(model.hf, read(way))
    assert packed._agrees(model)
    monkeypatch.setattr(packed, "CAUSAL", Visibility(causal=False))
    assert not packed._agrees(model)
