"""Block drafters: the same text as without them and as with transformers' own loop."""

import json
from itertools import pairwise, product
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

import dllm
from dllm.core.errors import CheckpointError, ConfigError
from dllm.drafting.base import Draft, DraftRequest, Feedback
from dllm.drafting.dflash.checkpoint import (
    BlockCheckpoint,
    draft_ids,
    format_of,
    is_block_drafter,
    load_checkpoint,
)
from dllm.drafting.dflash.drafter import BlockDrafter, BlockDrafting
from dllm.drafting.dflash.heads import head_of
from dllm.drafting.dflash.network import BlockNetwork
from dllm.models.forwards import CACHE
from dllm.train.dflash.model import drafter_config

from ...thin import some
from ..conftest import make_verifier, prompts
from .conftest import BLOCK, LENGTH, MASK, random_drafter, spy, write

# One worker trains the drafter that they share.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("dflash")]


def test_the_same_text_and_as_many_forwards_as_in_transformers(
    verifier: dllm.DiffusionModel, folder: Path
) -> None:
    hf: Any = verifier.hf
    native, info = MuseGlimmerAssistantModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    saved = 0
    for ids in prompts(2):
        calls: list[int] = []
        handle = hf.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        theirs = hf.generate(
            torch.tensor([ids]), max_new_tokens=LENGTH, do_sample=False,
            assistant_model=native.eval(), speculation_type="dflash",
        )[0, len(ids) :].tolist()  # fmt: skip
        handle.remove()
        plain = dllm.speculate(verifier, None, ids, max_new_tokens=LENGTH)
        ours = dllm.speculate(
            verifier, str(folder), ids, max_new_tokens=LENGTH, controller="full",
            search="argmax",
        )  # fmt: skip
        assert ours.tokens == theirs == plain.tokens
        assert abs(ours.nfe - len(calls)) <= 1  # the last round may be cut differently
        saved += plain.nfe - ours.nfe
    assert saved > 4  # the drafter is right often enough for this to mean something


@pytest.mark.parametrize(
    ("search", "temperature"),
    some(product(["argmax", "cps", "coupled", "best_first_tree", "sample"], [0.8, 0.0]), 1),
)
def test_no_search_changes_the_text(
    verifier: dllm.DiffusionModel, folder: Path, search: str, temperature: float
) -> None:
    how: dict[str, Any] = {"max_new_tokens": LENGTH, "temperature": temperature, "seed": 3}
    for ids in prompts(1):
        plain = dllm.speculate(verifier, None, ids, **how)
        result = dllm.speculate(verifier, str(folder), ids, search=search, **how)
        assert result.tokens == plain.tokens


@pytest.mark.parametrize("kind", some(["gqa", "windowed"], 1))
def test_a_drafter_for_another_network(kind: str, tmp_path: Path) -> None:
    other = make_verifier(kind)
    write(random_drafter(other), other, tmp_path, "native")
    for ids in prompts(2):
        plain = dllm.speculate(other, None, ids, max_new_tokens=24)
        drafted = dllm.speculate(other, str(tmp_path), ids, max_new_tokens=24, controller="full")
        assert drafted.tokens == plain.tokens
        assert drafted.drafted > 20


def test_rows_of_a_batch_are_what_they_are_alone(
    verifier: dllm.DiffusionModel, folder: Path
) -> None:
    asked = prompts(5)
    how: dict[str, Any] = {"max_new_tokens": LENGTH, "controller": "full"}
    together = dllm.speculate(verifier, str(folder), asked, **how)
    alone = [dllm.speculate(verifier, str(folder), ids, **how) for ids in asked]
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert sum(r.accepted for r in together) == sum(r.accepted for r in alone) > 0


def test_lookups_come_first(verifier: dllm.DiffusionModel, folder: Path) -> None:
    ids = prompts(1)[0]
    plain = dllm.speculate(verifier, None, ids, max_new_tokens=LENGTH)
    result = dllm.speculate(
        verifier, ["prompt_lookup", str(folder)], ids, max_new_tokens=LENGTH,
        controller="fixed(k=4)",
    )  # fmt: skip
    assert result.tokens == plain.tokens
    assert "argmax" in {stats.source for stats in result.rounds if stats.drafted}
    assert result.accepted > 0


def test_the_states_of_kept_nodes_are_read(verifier: dllm.DiffusionModel, folder: Path) -> None:
    """Of a tree those on the path, without the token that ended the text."""
    ids = np.array([5, 6, 7])
    opened = BlockDrafter(folder).open(DraftRequest(ids, 60, (), 30, verifier=verifier))
    assert isinstance(opened, BlockDrafting)
    states = torch.arange(7.0)[:, None]  # 3 tokens of the prompt, then 4 nodes
    draft = Draft(np.array([8, 9, 10, 11]), np.array([-1, -1, 0, 1]))
    for path, emitted, read in (
        ([1, 3], [9, 11, 12], [0, 1, 2, 4, 6]), ([0], [8, 5], [0, 1, 2, 3]), ([], [5], [0, 1, 2]),
        ([1, 3], [9, 11], [0, 1, 2, 4]),
    ):  # fmt: skip
        opened.observe(Feedback(draft, path, emitted, states))
        assert opened.unread.pop().flatten().tolist() == read


@pytest.mark.parametrize("window", [None, 6])
def test_drafting_row_by_row_is_one_forward_of_transformers(window: int | None) -> None:
    """Context read in pieces, two texts at once, against the native network in one go."""
    torch.manual_seed(0)
    shape = make_verifier("gqa").hf.config
    config = drafter_config(
        shape,
        layers=2,
        block_size=4,
        mask_token_id=MASK,
        target_layer_ids=[0],
        sliding_window=window,
    )
    native = MuseGlimmerAssistantModel(config).eval()
    network = BlockNetwork(
        BlockCheckpoint("x", config, dict(native.state_dict())), torch.device("cpu"), torch.float32
    )
    states, blocks = torch.randn(2, 11, 32), torch.randn(2, 4, 32)
    texts = [network.new_text(), network.new_text()]
    for row, cuts in enumerate(((0, 5, 6, 11), (0, 1, 7))):
        for first, last in pairwise(cuts):
            network.read(texts[row], states[row, first:last])
    got = network.draft(texts, blocks)
    for row, length in enumerate((11, 7)):
        cache = DFlashCache(config=config)
        cache.activate_past_recording()
        cache.set_previous_accepted_tokens(length)
        with torch.no_grad():
            expected = native(
                noise_embeds=blocks[row : row + 1],
                context_hidden_states=states[row : row + 1, :length],
                position_ids=torch.arange(length + 4)[None], **{CACHE: cache},
            ).last_hidden_state  # fmt: skip
        torch.testing.assert_close(got[row], expected[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["native", "z-lab", "speculators"])
def test_every_format_drafts_the_same(
    verifier: dllm.DiffusionModel, checkpoint: BlockCheckpoint, tmp_path: Path, kind: str
) -> None:
    write(checkpoint, verifier, tmp_path, kind)
    assert is_block_drafter(str(tmp_path))
    again = load_checkpoint(tmp_path)
    assert again.weights.keys() == checkpoint.weights.keys()
    assert all(torch.equal(again.weights[k], checkpoint.weights[k]) for k in again.weights)
    for name in ("target_layer_ids", "block_size", "mask_token_id", "layer_types", "head_dim"):
        assert getattr(again.config, name) == getattr(checkpoint.config, name)
    assert again.config.rope_parameters == checkpoint.config.rope_parameters


def test_the_files_say_what_their_engines_read(
    verifier: dllm.DiffusionModel, checkpoint: BlockCheckpoint, tmp_path: Path
) -> None:
    """Names as documented by the package speculators."""
    ids = torch.tensor([1, 4, 5, 9])
    trimmed = BlockCheckpoint("t", checkpoint.config, checkpoint.weights, ids)
    write(trimmed, verifier, tmp_path / "s", "speculators")
    layer = {f"layers.{i}.{part}.weight" for i in range(2) for part in (
        "input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
        "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
    )}  # fmt: skip
    keys = {"fc.weight", "hidden_norm.weight", "norm.weight", *layer}
    s = json.loads((tmp_path / "s" / "config.json").read_text())
    assert s["speculators_model_type"] == "dflash" and s["draft_vocab_size"] == 4
    assert s["aux_hidden_state_layer_ids"] == [1]  # the embedding counts
    assert s["transformer_layer_config"]["vocab_size"] == verifier.facts.vocab_size
    assert s["speculators_config"]["proposal_methods"] == [
        {"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}
    ]
    tensors = load_file(tmp_path / "s" / "model.safetensors")
    assert tensors.keys() == keys | {"t2d", "d2t", "lm_head.weight"}
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    assert tensors["d2t"].tolist() == [1, 3, 3, 6]
    head: Any = verifier.hf.get_output_embeddings()
    assert torch.equal(tensors["lm_head.weight"], head.weight[ids])
    assert draft_ids({"t2d": tensors["t2d"]}, "t").tolist() == ids.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", some(["native", "speculators"], 1))
@pytest.mark.slow
def test_a_trimmed_vocabulary_is_all_that_is_drafted(
    verifier: dllm.DiffusionModel, checkpoint: BlockCheckpoint, tmp_path: Path, kind: str
) -> None:
    ids = torch.arange(5, verifier.facts.vocab_size, 7)
    write(
        BlockCheckpoint("t", checkpoint.config, checkpoint.weights, ids), verifier, tmp_path, kind
    )
    allowed, drafted = set(ids.tolist()), 0
    for search in ("argmax", "cps", "sample"):
        part = BlockDrafter(tmp_path, search=search)
        seen = spy(part)
        for prompt in prompts(2):
            plain = dllm.speculate(verifier, None, prompt, max_new_tokens=20)
            result = dllm.speculate(verifier, part, prompt, max_new_tokens=20, controller="full")
            assert result.tokens == plain.tokens
        assert set(seen) <= allowed
        drafted += len(seen)
    assert drafted > 40


def test_the_example_loads() -> None:
    """Every part of it fits: the network, its ids, and a head that is run."""
    example = load_checkpoint(Path(__file__).parents[3] / "examples" / "smollm2-drafter")
    config = example.config
    assert example.draft_ids is not None and len(example.draft_ids) == 19_797
    rank = len(example.markov["project_in.weight"])
    assert example.markov["project_in.weight"].shape == (rank, config.hidden_size)
    assert example.markov["project_out.weight"].shape == (config.hidden_size, rank)
    head = head_of(example, torch.device("cpu"), torch.randn(9, 576), torch.randn(5, 576))
    assert head is not None and head.over(torch.zeros(1, 576), torch.arange(5)[None])(3, 0).any()


def test_a_pickled_embedding_of_the_mask_is_spoken_of(folder: Path, tmp_path: Path) -> None:
    """As some releases bring it: their verifier's own row is untrained, often zero."""
    copied = Path(copytree(folder, tmp_path / "drafter"))
    torch.save(torch.zeros(32), copied / "mask_embedding.pt")
    with pytest.warns(RuntimeWarning, match=f"is not read: .* to row {MASK} of the verifier's"):
        load_checkpoint(copied)


def test_unknown_checkpoints_are_refused(
    verifier: dllm.DiffusionModel, checkpoint: BlockCheckpoint, tmp_path: Path
) -> None:
    others = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert format_of(others) is None
    assert format_of(others | {"architectures": ["X", "DFlashDraftModel"]}) == "z-lab"
    assert not is_block_drafter(str(tmp_path)) and not is_block_drafter(verifier)
    with pytest.raises(CheckpointError, match="no DFlash checkpoint"):
        load_checkpoint(tmp_path)
    write(checkpoint, verifier, tmp_path, "z-lab")
    weights, file = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    norm = weights.pop("norm.weight")
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=r"lacks weights: norm\.weight"):
        load_checkpoint(tmp_path)
    save_file(weights | {"norm.weight": norm, "gru.weight": norm + 1}, file)
    with pytest.raises(CheckpointError, match=r"unknown weights: gru\.weight"):
        load_checkpoint(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["dflash_config"]["conv_kernel_size"] = 2
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"lacks weights: layers\.0\.attention_conv"):
        load_checkpoint(tmp_path)
    file.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    raw["dflash_config"].pop("conv_kernel_size")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="only safetensors"):
        load_checkpoint(tmp_path)


def test_wrong_pairs_and_options_are_refused(folder: Path) -> None:
    other = dllm.load("nano-ar")
    with pytest.raises(ConfigError, match="trained for a verifier of width 32"):
        dllm.speculate(other, str(folder), "1+1=")
    with pytest.raises(ConfigError, match="window is for diffusion models"):
        dllm.speculate(other, str(folder), "1+1=", window=4)
    with pytest.raises(ConfigError, match="head is one of auto"):
        BlockDrafter(folder, head="best")
