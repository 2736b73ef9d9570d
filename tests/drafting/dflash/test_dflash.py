"""Block drafters: the same text as without them and as with transformers' own loop."""

from __future__ import annotations

import itertools
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

import dllm
from dllm.drafting.base import Budget
from dllm.drafting.dflash.checkpoint import (
    BlockCheckpoint,
    draft_ids,
    format_of,
    is_block_drafter,
    load_checkpoint,
)
from dllm.drafting.dflash.drafter import BlockDrafter
from dllm.drafting.dflash.heads import MarkovHead, SelectorHead
from dllm.drafting.dflash.network import BlockNetwork
from dllm.drafting.dflash.walks import Walk, candidates
from dllm.drafting.drafters.followers import Followers
from dllm.drafting.length.control import LengthController
from dllm.errors import CheckpointError, ConfigError
from dllm.train.dflash.data import Answer, Batches, Taps
from dllm.train.dflash.export import export
from dllm.train.dflash.model import copy_layers, drafter_config, new_drafter
from dllm.train.dflash.objective import Objective, trainee_of

from ...thin import covering
from ..conftest import make_verifier, prompts

pytestmark = pytest.mark.filterwarnings("default")
BLOCK, MASK, LENGTH = 5, 3, 24


@pytest.fixture(scope="module")
def checkpoint(verifier: dllm.DiffusionModel) -> BlockCheckpoint:
    """A drafter that knows some of the verifier's texts: often right."""
    hf: Any = verifier.hf
    torch.manual_seed(0)
    answers = []
    for ids in prompts(6):
        text = hf.generate(torch.tensor([ids]), max_new_tokens=LENGTH + 4, do_sample=False)[
            0
        ].tolist()
        answers.append(Answer(tuple(text), len(ids)))
    config = drafter_config(hf.config, layers=2, block_size=BLOCK, mask_token_id=MASK, taps=[0])
    drafter = new_drafter(config)
    copy_layers(drafter, hf)
    seen = sorted({token for answer in answers for token in answer.ids})
    trainee = trainee_of(drafter, hf, Objective(soft=0.0), torch.tensor(seen))
    batches = Batches(answers, 6, 12, 0, 80, Taps([0], 32))
    optimizer = torch.optim.AdamW(drafter.parameters(), 5e-3)
    for i in range(80):
        trainee(**batches[i])["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: t.detach() for name, t in drafter.state_dict().items()}
    return BlockCheckpoint("tiny", drafter.config, weights)


@pytest.fixture(scope="module")
def folder(
    checkpoint: BlockCheckpoint, verifier: dllm.DiffusionModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:  # fmt: skip
    path = tmp_path_factory.mktemp("native")
    write(checkpoint, verifier, path, "native")
    return path


def write(checkpoint: BlockCheckpoint, verifier: Any, path: Path, kind: str) -> None:
    export(
        checkpoint, path, kind, verifier=verifier.hf.config, verifier_name="tiny",
        head=verifier.hf.get_output_embeddings().weight.detach(), dtype=torch.float32,
    )  # fmt: skip


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
            verifier, str(folder), ids, max_new_tokens=LENGTH, controller="whole",
            search="argmax",
        )  # fmt: skip
        assert ours.tokens == theirs == plain.tokens
        assert abs(ours.nfe - len(calls)) <= 1  # the last round may be cut differently
        saved += plain.nfe - ours.nfe
    assert saved > 4  # the drafter is right often enough for this to mean something


@pytest.mark.parametrize(
    ("search", "temperature"),
    covering(["argmax", "cps", "coupled", "best_first_tree", "sample"], [0.0, 0.8]),
)
def test_no_search_changes_the_text(
    verifier: dllm.DiffusionModel, folder: Path, search: str, temperature: float
) -> None:
    how: dict[str, Any] = {"max_new_tokens": LENGTH, "temperature": temperature, "seed": 3}
    for ids in prompts(1):
        plain = dllm.speculate(verifier, None, ids, **how)
        result = dllm.speculate(verifier, str(folder), ids, search=search, **how)
        assert result.tokens == plain.tokens


@pytest.mark.parametrize("kind", ["windowed", "gqa"])
def test_a_drafter_for_another_network(kind: str, tmp_path: Path) -> None:
    other = make_verifier(kind)
    torch.manual_seed(1)
    config = drafter_config(other.hf.config, layers=1, block_size=4, mask_token_id=MASK, taps=[0])
    weights = dict(new_drafter(config).state_dict())
    write(BlockCheckpoint("x", config, weights), other, tmp_path, "native")
    for ids in prompts(2):
        plain = dllm.speculate(other, None, ids, max_new_tokens=24)
        drafted = dllm.speculate(other, str(tmp_path), ids, max_new_tokens=24, controller="whole")
        assert drafted.tokens == plain.tokens
        assert drafted.drafted > 20


def test_rows_of_a_batch_are_what_they_are_alone(
    verifier: dllm.DiffusionModel, folder: Path
) -> None:
    asked = prompts(5)
    how: dict[str, Any] = {"max_new_tokens": LENGTH, "controller": "whole"}
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


@pytest.mark.parametrize("window", [None, 6])
def test_drafting_row_by_row_is_one_forward_of_transformers(window: int | None) -> None:
    """Context read in pieces, two texts at once, against the native network in one go."""
    torch.manual_seed(0)
    shape = make_verifier("gqa").hf.config
    config = drafter_config(
        shape, layers=2, block_size=4, mask_token_id=MASK, taps=[0], sliding_window=window
    )
    native = MuseGlimmerAssistantModel(config).eval()
    network = BlockNetwork(
        BlockCheckpoint("x", config, dict(native.state_dict())), torch.device("cpu"), torch.float32
    )
    taps, blocks = torch.randn(2, 11, 32), torch.randn(2, 4, 32)
    texts = [network.new_text(), network.new_text()]
    for row, cuts in enumerate(((0, 5, 6, 11), (0, 1, 7))):
        for first, last in pairwise(cuts):
            network.read(texts[row], taps[row, first:last])
    got = network.draft(texts, blocks)
    for row, length in enumerate((11, 7)):
        cache = DFlashCache(config=config)
        cache.activate_past_recording()
        cache.set_previous_accepted_tokens(length)
        with torch.no_grad():
            expected = native(
                noise_embeds=blocks[row : row + 1],
                context_hidden_states=taps[row : row + 1, :length],
                position_ids=torch.arange(length + 4)[None], past_key_values=cache,
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
    """Names as documented by z-lab and by the package speculators."""
    ids = torch.tensor([1, 4, 5, 9])
    trimmed = BlockCheckpoint("t", checkpoint.config, checkpoint.weights, ids)
    write(checkpoint, verifier, tmp_path / "z", "z-lab")
    write(trimmed, verifier, tmp_path / "s", "speculators")
    z = json.loads((tmp_path / "z" / "config.json").read_text())
    assert z["architectures"] == ["DFlashDraftModel"] and z["model_type"] == "qwen3"
    assert z["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [0]}
    assert (z["block_size"], z["num_target_layers"]) == (BLOCK, 2)
    layer = {f"layers.{i}.{part}.weight" for i in range(2) for part in (
        "input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
        "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
    )}  # fmt: skip
    keys = {"fc.weight", "hidden_norm.weight", "norm.weight", *layer}
    assert load_file(tmp_path / "z" / "model.safetensors").keys() == keys
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
    assert draft_ids({"t2d": tensors["t2d"]}).tolist() == ids.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["native", "speculators"])
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
            result = dllm.speculate(verifier, part, prompt, max_new_tokens=20, controller="whole")
            assert result.tokens == plain.tokens
        assert set(seen) <= allowed
        drafted += len(seen)
    assert drafted > 40


def spy(part: BlockDrafter) -> list[int]:
    """Every token that a drafter proposes from now on."""
    seen: list[int] = []
    whole = part.propose_all

    def propose_all(work: Any) -> Any:
        drafts = whole(work)
        for draft in drafts:
            seen.extend(draft.tokens.tolist())
        return drafts

    part.propose_all = propose_all  # type: ignore[method-assign]
    return seen


def test_a_markov_head_adds_a_bias_for_the_token_before() -> None:
    torch.manual_seed(0)
    first, second, gate = torch.randn(6, 3), torch.randn(6, 3), torch.randn(3, 7)
    shift, hidden = torch.randn(3), torch.randn(2, 4)
    every = torch.arange(6).expand(2, -1)
    for row in range(2):
        plain = MarkovHead(first.numpy(), second).over(hidden, every)(None, 2, row)[0]
        expected = [sum(second[v, r] * first[2, r] for r in range(3)) for v in range(6)]
        torch.testing.assert_close(torch.from_numpy(plain), torch.stack(expected))
        for more in (None, shift):
            gated = MarkovHead(first.numpy(), second, gate, more).over(hidden, every)(None, 2, row)[
                0
            ]
            raw = gate @ torch.cat([hidden[row], first[2]])
            opened = torch.sigmoid(raw if more is None else raw + more)
            torch.testing.assert_close(torch.from_numpy(gated), second @ (opened * first[2]))


def test_a_selector_chooses_among_the_most_probable() -> None:
    torch.manual_seed(0)
    before, successor, project = torch.randn(6, 3), torch.randn(6, 3), torch.randn(3, 4)
    hidden, logits = torch.randn(1, 4), torch.tensor([[5.0, 4.0, 0.0, 4.5, 1.0, -3.0]])
    _, at = candidates(logits)
    assert at[0].tolist() == [0, 3, 1, 4, 2, 5]
    bias = SelectorHead(before.numpy(), successor, project, top=3).over(hidden, at)(None, 1, 0)[0]
    assert np.isinf(bias).tolist() == [False] * 3 + [True] * 3
    for place, token in enumerate((0, 3, 1)):
        score = (before[1] * (project @ hidden[0])) @ successor[token]
        assert bias[place] == pytest.approx(float(score), rel=1e-5)


@pytest.mark.parametrize("part", ["markov", "selector"])
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
    with pytest.raises(ConfigError, match="Markov head, GRU or selector"):
        BlockDrafter(checkpoint, head="tree")
    for ids in prompts(2):
        plain = dllm.speculate(verifier, None, ids, max_new_tokens=12)
        tree = dllm.speculate(
            verifier, str(tmp_path), ids, max_new_tokens=12, controller="whole", head="tree",
            nodes=6, copies=False,
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
                copies=False,
            )  # fmt: skip
            assert chosen.tokens == plain.tokens
            assert max(stats.drafted for stats in chosen.rounds) == nodes
    drafter = BlockDrafter(tmp_path, copies=False)
    for temperature in (0.0, 0.8):
        how: dict[str, Any] = {"max_new_tokens": 20, "temperature": temperature, "seed": 1}
        for ids in prompts(2):
            seen = spy(drafter)
            plain = dllm.speculate(verifier, None, ids, **how)
            result = dllm.speculate(verifier, drafter, ids, controller="whole", **how)
            assert result.tokens == plain.tokens
            if part == "markov":
                steps = np.diff(np.asarray(seen)) % size
                assert len(seen) > 20 and (steps == 1).mean() > 0.7


@pytest.mark.parametrize(("head", "temperature"), [("chain", 0.0), ("tree", 0.0), ("tree", 0.8)])
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
    for controller in ("whole", "rate"):
        drafter = BlockDrafter(tmp_path, head=head, nodes=20)
        drafted = dllm.speculate(verifier, drafter, texts, controller=controller, **how)
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]
        depth = max(stats.depth for one in drafted for stats in one.rounds)
        assert depth > checkpoint.config.block_size - 1 or controller == "rate"
        assert drafter.hits[temperature > 0]._judged and not drafter.hits[temperature == 0]._judged


def test_followers_are_those_of_the_text() -> None:
    """Against counting by hand; learnt at once and in pieces."""
    text = np.array([1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2])
    whole, pieces = Followers(3), Followers(3)
    whole.learn(text)
    for end in (1, 2, 5, 9, 12):
        pieces.learn(text[:end])
    assert whole.counts == pieces.counts
    assert list(whole.behind([5, 1, 2])) == [(2, {4: 1, 3: 2}), (1, {4: 1, 3: 2})]
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
            rows = [(logits[i] + torch.from_numpy(bias(None, a, i)[0])).log_softmax(-1)[b]
                    for i, (a, b) in enumerate(steps)]  # fmt: skip
            scores[path] = float(sum(rows))
    expected = sorted(scores, key=lambda path: -scores[path])[:9]
    draft = walk.grow(3, 9)
    got: list[tuple[int, ...]] = []
    for parent, token in zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True):
        got.append((*(() if parent < 0 else got[parent]), token))
    assert got == expected
    np.testing.assert_allclose(draft.alive, [np.exp(scores[path]) for path in expected], rtol=1e-5)
    chain = walk.chain(3)
    best: tuple[int, ...] = ()
    for _ in range(3):
        best = max((p for p in scores if p[:-1] == best), key=lambda path: scores[path])
    assert tuple(chain.tokens.tolist()) == best


def test_unknown_checkpoints_are_refused(
    verifier: dllm.DiffusionModel, checkpoint: BlockCheckpoint, tmp_path: Path
) -> None:
    assert format_of({"model_type": "llama"}) is None
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
