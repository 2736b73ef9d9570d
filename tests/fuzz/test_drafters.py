"""Damaged folders of block drafters: every one drafts, or fails with one sentence.

A case is a copy of a tiny drafter in one of three formats, as DFlash, DFlash 2 or DSpark, with one
to three random faults in it; `damage` says which.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dllm
from dllm.drafting.dflash.checkpoint import BlockCheckpoint, is_block_drafter
from dllm.drafting.dflash.config import Variant
from dllm.train.dflash.model import drafter_config

from ..cli.conftest import Run, cli  # noqa: F401
from ..drafting.conftest import make_verifier
from ..drafting.dflash.conftest import random_weights, write
from . import damage as harm

FIELDS = (
    "dflash_config", "transformer_layer_config", "speculators_model_type", "block_size",
    "mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids", "layer_types",
    "sliding_window", "rope_parameters", "rope_scaling", "rope_theta", "conv_kernel_size",
    "conv_group_size", "selector_top_k", "sample_from_anchor", "hidden_act", "rms_norm_eps",
    "is_causal", "output_multiplier", "final_logit_softcapping", "head_dim", "model_type",
    "architectures", "num_hidden_layers", "hidden_size", "max_position_embeddings",
    "pure_draft_prefix_len", "shift_label", "input_embedding_scale", "causal", "use_swa",
    "swa_window_size", "projector_type", "dspark_bonus_anchor",
)  # fmt: skip
INSIDE = ("dflash_config", "transformer_layer_config", "rope_parameters")


def config_field(folder: Path, rng: random.Random) -> str:
    config = json.loads((folder / "config.json").read_text())
    places = [None, *(name for name in INSIDE if isinstance(config.get(name), dict))]
    place = rng.choice(places)
    known = list(config if place is None else config[place])
    name, value = rng.choice([*known, *FIELDS]), rng.choice(harm.HOSTILE)

    def change(content: dict[str, Any]) -> None:
        (content if place is None else content[place])[name] = value

    harm.rewrite(folder / "config.json", change)
    return f"config {place} {name}={value!r:.40}"


def vocabulary(folder: Path, rng: random.Random) -> str:
    """Ids that are no ids of the verifier, or no ids at all."""
    file = folder / "model.safetensors"
    kind = rng.choice(["d2t", "t2d", "lm_head.weight"])
    value = rng.choice([
        torch.zeros(0, dtype=torch.int64), torch.full((4,), 10**6), torch.tensor([-3, 0, 0]),
        torch.randn(4), torch.ones(3, 3, dtype=torch.bool), torch.zeros(5, dtype=torch.bool),
        torch.tensor([3, 1, 0, -2]),
    ])  # fmt: skip
    save_file(load_file(file) | {kind: value}, file, metadata={"format": "pt"})
    return f"{kind} {tuple(value.shape)} {value.dtype}"


FAULTS = (config_field, config_field, config_field, harm.drop_field, harm.index, *harm.OF_FILES,
          vocabulary)  # fmt: skip


@pytest.fixture(scope="module")
def verifier() -> dllm.DiffusionModel:
    return make_verifier("gqa")


@pytest.fixture(scope="module")
def drafters(verifier: dllm.DiffusionModel, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Whole ones: every format, with and without what goes beyond DFlash."""
    torch.manual_seed(0)
    hf: Any = verifier.hf
    head = hf.get_output_embeddings().weight.detach()
    config = drafter_config(
        hf.config, layers=1, block_size=4, mask_token_id=3, target_layer_ids=[0]
    )
    ids = torch.arange(0, len(head), 3)
    rank, width = 4, head.shape[1]
    selector = {"predecessor_codebook": torch.randn(len(head), rank),
                "successor_codebook": torch.randn(len(head), rank),
                "hidden_projection.weight": torch.randn(rank, width)}  # fmt: skip
    markov = {
        "markov_w1.weight": torch.randn(len(head), rank),
        "markov_w2.weight": torch.randn(len(ids), rank),
    }
    second = Variant(conv_kernel_size=2, conv_group_size=8)
    made = []
    for name, kind, variant, more in (
        ("native", "native", Variant(), {}), ("z", "z-lab", Variant(), {}),
        ("speculators", "speculators", Variant(), {"draft_ids": ids}),
        ("native2", "native", second, {"draft_ids": ids, "markov": markov}),
        ("z2", "z-lab", second, {"selector": selector}),
        ("speculators2", "speculators", second, {"selector": selector}),
    ):  # fmt: skip
        weights = random_weights(config, variant)
        folder = tmp_path_factory.mktemp(name)
        checkpoint = BlockCheckpoint(name, config, weights, variant=variant, **more)
        write(checkpoint, verifier, folder, kind, torch.bfloat16)
        made.append(folder)
    return made


def check(verifier: Any, drafters: list[Path], folder: Path, seed: int) -> bool:
    """Draft with a damaged copy; whether it could be."""
    rng = random.Random(seed)
    source = rng.choice(drafters)
    shutil.copytree(source, folder)
    done = [source.name, *harm.damage(folder, rng, FAULTS, (1, 1, 1, 2, 3))]

    def read() -> None:
        is_block_drafter(folder)
        drafted = dllm.speculate(verifier, str(folder), [1, 2, 3], max_new_tokens=6)
        assert drafted.tokens == dllm.speculate(verifier, None, [1, 2, 3], max_new_tokens=6).tokens

    return harm.works(read, (seed, done))


@pytest.mark.fuzz(10)
def test_a_damaged_drafter_is_one_sentence(
    verifier: Any, drafters: list[Path], tmp_path: Path, seeds: range
) -> None:
    assert not all(
        harm.of_each(seeds, tmp_path, lambda folder, seed: check(verifier, drafters, folder, seed))
    )


def test_whole_ones_draft(verifier: Any, drafters: list[Path]) -> None:
    plain = dllm.speculate(verifier, None, [1, 2, 3], max_new_tokens=12)
    for folder in drafters:
        result = dllm.speculate(
            verifier, str(folder), [1, 2, 3], max_new_tokens=12, controller="full"
        )
        assert result.tokens == plain.tokens and result.drafted > 10


def test_on_the_command_line_it_is_one_line_and_two(
    cli: Run,  # noqa: F811
    drafters: list[Path],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(drafters[1], folder)
    (folder / "model.safetensors").write_bytes(b"\x00" * 40)
    result = cli("generate", "1+1=", "--verifier", "nano-ar", "--drafter", str(folder))
    assert result.exit_code == 2 and "truncated or corrupt" in result.output
    assert "Traceback" not in result.output
