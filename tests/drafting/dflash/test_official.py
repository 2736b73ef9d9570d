"""Block drafters beyond DFlash against what their official code computed (recorded by
benchmarks/dflash_official.py)."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import dllm
from dllm.core.errors import CheckpointError
from dllm.drafting.base import Draft
from dllm.drafting.dflash.checkpoint import BlockCheckpoint, load_checkpoint
from dllm.drafting.dflash.config import Variant, format_of, read_config
from dllm.drafting.dflash.drafter import Binding, BlockDrafter
from dllm.drafting.dflash.network import BlockNetwork
from dllm.drafting.dflash.walks import Walk, candidates
from dllm.train.dflash.model import drafter_config

from ...thin import some
from ..conftest import prompts
from .conftest import random_drafter, random_weights, write

# One worker trains the drafter that they share.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("dflash")]
DATA = Path(__file__).parents[2] / "golden" / "data" / "dflash"
CASES = sorted(folder.name for folder in DATA.iterdir())
MASK = 3


def bind(folder: Path) -> tuple[Binding, dict[str, torch.Tensor]]:
    """A recorded checkpoint with the embedding and the head that it was recorded with.

    SpecForge trains the anchor's row of DSpark to draft, as its engines serve it; its own loop, the
    recorded one, leaves that row out and so reads every draft one row too far.
    """
    checkpoint = load_checkpoint(folder)
    if folder.name == "specforge-dspark":
        assert checkpoint.variant.sample_from_anchor
        variant = replace(checkpoint.variant, sample_from_anchor=False)
        checkpoint = replace(checkpoint, variant=variant)
    recorded = load_file(folder / "recorded.safetensors")
    embedding, head = recorded["embedding"], recorded["head"]
    hf: Any = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(embedding), hidden_size=embedding.shape[1], intermediate_size=16,
        num_hidden_layers=6, num_attention_heads=2, tie_word_embeddings=False,
    ))  # fmt: skip
    with torch.no_grad():
        hf.model.embed_tokens.weight.copy_(embedding)
        if len(head) == len(embedding):
            hf.lm_head.weight.copy_(head)
    return Binding(checkpoint, hf), recorded


def test_every_case_was_recorded() -> None:
    assert len(CASES) == 3


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_logits_and_drafts_are_the_official_ones(case: str) -> None:
    bound, recorded = bind(DATA / case)
    blocks = []
    for anchor, token in zip(*(recorded[k].tolist() for k in ("anchors", "tokens")), strict=True):
        text = bound.network.new_text()
        bound.network.read(text, recorded["taps"][:anchor])
        blocks.append(SimpleNamespace(anchor=token, text=text))
    hidden, logits = bound.block(blocks)  # type: ignore[arg-type]
    torch.testing.assert_close(hidden, recorded["hidden"], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(logits, recorded["logits"], atol=2e-4, rtol=1e-4)
    assert bound.walk is not None
    for n, block in enumerate(blocks):
        values, at = candidates(logits[n])
        named = at if bound.draft_ids is None else bound.draft_ids[at]
        sure = None if bound.sure is None else bound.sure.over(hidden[n])
        assert (sure is not None) == ("sure" in recorded)
        walk = Walk(bound.walk.over(hidden[n], at), block.anchor, values.numpy(), named.numpy(),
                    sure=sure)  # fmt: skip
        places = recorded["drafts"][n]
        expected = places if bound.draft_ids is None else bound.draft_ids[places]
        chain = walk.grow(len(logits[n]), len(logits[n]), branches=False)
        assert [node.token for node in chain][: len(expected)] == expected.tolist()
        if sure is not None:
            confidence = np.exp([node.chance for node in chain])
            np.testing.assert_allclose(confidence, recorded["sure"][n], atol=1e-5)
        tree = walk.grow(len(logits[n]), 12)
        drafted = Draft(np.array([n.token for n in tree]), np.array([n.parent for n in tree]))
        for node in range(len(tree)):
            path = [int(drafted.tokens[i]) for i in drafted.path(node)]
            before, total = block.anchor, 0.0
            for depth, token in enumerate(path):
                log_q = walk.after(before, depth)
                total = float(log_q[named[depth].tolist().index(token)])
                before = token
            assert tree[node].chance == pytest.approx(total, abs=1e-5)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


@pytest.mark.parametrize(
    ("more", "says", "windows"),
    [
        ({}, (False, False, False), None),
        ({"architectures": ["DFlash2DraftModel"]}, (False, False, False), None),
        ({"architectures": ["DSparkDraftModel"]}, (True, False, False), None),
        ({"architectures": ["Qwen3DSparkModel"]}, (True, False, False), None),
        ({"dflash_config": {"projector_type": "dspark"}, "dspark_bonus_anchor": True},
         (False, False, False), None),
        ({"dflash_config": {"projector_type": "dspark"}}, (True, False, False), None),
        ({"dflash_config": {"causal_head": True}}, (False, True, True), None),
        (SLIDING, (False, False, True), 7),
        ({**SLIDING, "dflash_config": {"causal": False}}, (False, False, False), 7),
        ({**SLIDING, "is_causal": True, "causal": False}, (False, True, True), 7),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 6}}, (False, False, False), 5),
    ],
)  # fmt: skip
def test_config_says_which_rows_draft_and_what_they_see(
    more: dict[str, Any], says: tuple[bool, bool, bool], windows: int | None
) -> None:
    """As vLLM and SGLang read the files of z-lab, SpecForge, DeepSpec, JetSpec and MiMo."""
    raw = {
        "architectures": ["DFlashDraftModel"], "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "block_size": 4, "mask_token_id": MASK,
        "target_layer_ids": [0], **more,
    }  # fmt: skip
    assert format_of(raw) == "z-lab"
    config, variant = read_config(raw, "z-lab", "x")
    assert (variant.sample_from_anchor, variant.causal, variant.causal_windows) == says
    second = raw["architectures"] == ["DFlash2DraftModel"]  # the others embed as the verifier does
    assert variant.input_embedding_scale == (1.0 if second else None)
    sliding = "sliding_attention" in (config.layer_types or [])
    assert (config.sliding_window if sliding else None) == windows


@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_a_scaled_rotation_is_read_under_both_names(name: str) -> None:
    scaled = {"factor": 4.0, "original_max_position_embeddings": 1024}
    raw = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "block_size": 4, "mask_token_id": MASK, "target_layer_ids": [0],
        "rope_theta": 5000.0, "rope_scaling": {name: "yarn", **scaled},
        "max_position_embeddings": 4096,
    }  # fmt: skip
    config, _ = read_config(raw, "z-lab", "x")
    expected = {"rope_type": "yarn", "rope_theta": 5000.0, **scaled}
    assert expected.items() <= dict(config.rope_parameters or {}).items()


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_positions_are_turned_as_transformers_does(
    verifier: dllm.DiffusionModel, kind: str
) -> None:
    """Those of "dynamic" by how long a text is, none as was kept for a longer one."""
    checkpoint = random_drafter(verifier)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 5000.0}
    checkpoint.config.rope_parameters = rope | ({"factor": 2.0} if kind == "dynamic" else {})
    checkpoint.config.max_position_embeddings = 32
    network = BlockNetwork(checkpoint, torch.device("cpu"), torch.float32)
    twin = BlockNetwork(checkpoint, torch.device("cpu"), torch.float32).rotary
    for lengths in ([0], [90, 3], [50], [7], [200]):
        texts = [SimpleNamespace(length=n) for n in lengths]
        places = torch.tensor(lengths)[:, None] + torch.arange(4)
        got = network._rotation(texts, 4)  # type: ignore[arg-type]
        expected = twin(torch.zeros(1), places.view(1, -1))
        assert all(
            torch.equal(a.view(1, -1, a.shape[-1]), b) for a, b in zip(got, expected, strict=True)
        )


@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_a_causal_block_do_not_see_the_rows_behind_them(
    verifier: dllm.DiffusionModel, causal: bool
) -> None:
    checkpoint = replace(random_drafter(verifier), variant=Variant(causal=causal))
    network = BlockNetwork(checkpoint, torch.device("cpu"), torch.float32)
    texts = [network.new_text(), network.new_text()]
    states, blocks = torch.randn(9, 32), torch.randn(1, 4, 32).repeat(2, 1, 1)
    blocks[1, -1] += 1
    for text in texts:
        network.read(text, states)
    one, other = network.draft(texts, blocks)
    assert bool((one[:-1] == other[:-1]).all()) == causal and not torch.equal(one[-1], other[-1])


def test_rows_before_the_first_do_not_exist_for_a_convolution() -> None:
    """Against a loop over rows, channels and places."""
    from dllm.drafting.dflash.network import convolve

    torch.manual_seed(0)
    x, dynamic, base = torch.randn(2, 4, 6), torch.randn(2, 4, 3, 2), torch.randn(3, 6)
    got = convolve(x, dynamic, base)
    for n in range(2):
        for i in range(4):
            for c in range(6):
                terms = [(base[t, c] + dynamic[n, i, t, c // 3]) * x[n, i - t, c]
                         for t in range(3) if i >= t]  # fmt: skip
                assert got[n, i, c] == pytest.approx(float(sum(terms)), abs=1e-5)


def test_a_fresh_dflash_2_network_is_dflash(verifier: dllm.DiffusionModel, tmp_path: Path) -> None:
    """The same hidden states to the bit, also when saved."""
    hf: Any = verifier.hf
    config = drafter_config(
        hf.config, layers=2, block_size=4, mask_token_id=MASK, target_layer_ids=[0]
    )
    torch.manual_seed(0)
    variant = Variant(conv_kernel_size=2, conv_group_size=16)
    second = random_weights(config, variant)
    plain = {k: v for k, v in second.items() if "_conv." not in k}
    assert len(second) - len(plain) == 8
    states, blocks = torch.randn(9, 32), torch.randn(1, 4, 32)
    outs = []
    for weights, kind in ((plain, Variant()), (second, variant)):
        checkpoint = BlockCheckpoint("x", config, weights, variant=kind)
        folder = tmp_path / str(len(outs))
        write(checkpoint, verifier, folder, "native")
        loaded = load_checkpoint(folder)
        assert loaded.variant == kind
        network = BlockNetwork(loaded, torch.device("cpu"), torch.float32)
        network.compiled = None  # kernels take layers without convolutions only
        text = network.new_text()
        network.read(text, states)
        outs.append(network.draft([text], blocks))
    assert torch.equal(outs[0], outs[1])


def with_selector(verifier: dllm.DiffusionModel, top: int = 6) -> BlockCheckpoint:
    hf: Any = verifier.hf
    torch.manual_seed(2)
    config = drafter_config(
        hf.config, layers=1, block_size=4, mask_token_id=MASK, target_layer_ids=[0]
    )
    size, variant = verifier.facts.vocab_size, Variant(2, 8, selector_top_k=top)
    return BlockCheckpoint(
        "x", config, random_weights(config, variant), variant=variant,
        selector={"predecessor_codebook": torch.randn(size, 4),
                  "successor_codebook": torch.randn(size, 4),
                  "hidden_projection.weight": torch.randn(4, 32)},
    )  # fmt: skip


@pytest.mark.parametrize("kind", some(["speculators", "z-lab", "native"], 1))
def test_dflash_2_is_read_in_every_format(
    verifier: dllm.DiffusionModel, tmp_path: Path, kind: str
) -> None:
    checkpoint = with_selector(verifier)
    write(checkpoint, verifier, tmp_path, kind)
    again = load_checkpoint(tmp_path)
    for name in ("weights", "selector"):
        given, found = getattr(checkpoint, name), getattr(again, name)
        assert given.keys() == found.keys()
        assert all(torch.equal(given[k], found[k]) for k in given)
    assert again.variant.conv_kernel_size == 2 and again.variant.conv_group_size == 8
    assert again.variant.selector_top_k == 6 and not again.variant.causal_windows
    texts = []
    for source in (checkpoint, again):
        for ids in prompts(2):
            got = dllm.speculate(verifier, BlockDrafter(source), ids, max_new_tokens=16,
                                 controller="full")  # fmt: skip
            assert got.tokens == dllm.speculate(verifier, None, ids, max_new_tokens=16).tokens
            texts.append([stats.accepted for stats in got.rounds])
    assert texts[:2] == texts[2:]


def test_parts_that_do_not_fit_are_one_sentence(verifier: dllm.DiffusionModel) -> None:
    whole = with_selector(verifier)
    rows = whole.selector["successor_codebook"]
    short = {**whole.selector, "successor_codebook": rows[:-1]}
    lacking = {k: v for k, v in whole.selector.items() if k != "hidden_projection.weight"}
    for checkpoint, match in (
        (replace(whole, selector=short), "does not fit"),
        (replace(whole, selector=lacking), "lacks hidden_projection"),
        (replace(whole, draft_ids=torch.tensor([1, 10**6])), "trained for another"),
        (replace(whole, confidence={"proj.weight": torch.randn(1, 7)}), "confidence head"),
    ):
        with pytest.raises(CheckpointError, match=match):
            Binding(checkpoint, verifier.hf)
