"""A block drafter that is often right, and what tests do with it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dllm
from dllm.drafting.dflash.checkpoint import EXTRAS, WEIGHTS, BlockCheckpoint, expected_weights
from dllm.drafting.dflash.config import DFLASH, Variant
from dllm.drafting.dflash.drafter import BlockDrafter
from dllm.train.dflash.data import Answer, Batches, HiddenStates
from dllm.train.dflash.export import export
from dllm.train.dflash.model import copy_layers, drafter_config, new_drafter
from dllm.train.dflash.objective import Objective, Trainee

from ..conftest import prompts
from .speculators import write_speculators

BLOCK, MASK, LENGTH = 5, 3, 24


@pytest.fixture(scope="session")
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
    config = drafter_config(
        hf.config, layers=2, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=[0]
    )
    drafter = new_drafter(config)
    copy_layers(drafter, hf)
    seen = sorted({token for answer in answers for token in answer.ids})
    trainee = Trainee(drafter, hf, Objective(soft=0.0), torch.tensor(seen))
    batches = Batches(answers, 6, 12, 0, 60, HiddenStates([0], 32))
    optimizer = torch.optim.AdamW(drafter.parameters(), 5e-3)
    for i in range(60):
        trainee(**batches[i])["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: t.detach() for name, t in drafter.state_dict().items()}
    return BlockCheckpoint("tiny", drafter.config, weights)


@pytest.fixture(scope="session")
def folder(
    checkpoint: BlockCheckpoint, verifier: dllm.DiffusionModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:  # fmt: skip
    path = tmp_path_factory.mktemp("native")
    write(checkpoint, verifier, path, "native")
    return path


def write(
    checkpoint: BlockCheckpoint, verifier: Any, path: Path, kind: str,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """A folder in one of the three formats that are read, with what DFlash 2 has beside it."""
    if kind == "native":
        export(checkpoint, path, verifier.facts.vocab_size, dtype)
    else:
        write_speculators(checkpoint, path, verifier.hf, "tiny", dtype)
    variant = checkpoint.variant
    changed = {k: v for k, v in asdict(variant).items() if v != getattr(DFLASH, k)}
    if changed or checkpoint.selector:
        _beyond_dflash(checkpoint, path, kind, changed, dtype)
    if kind == "z-lab":
        as_z_lab(path, checkpoint.config)


def _beyond_dflash(
    checkpoint: BlockCheckpoint, path: Path, kind: str, changed: dict[str, Any], dtype: torch.dtype
) -> None:
    """Add the variant to the config.json of a folder, and the selector to its weights."""
    file = path / "config.json"
    raw = json.loads(file.read_text()) | changed
    if kind != "native" and checkpoint.variant.conv_kernel_size:
        raw |= {"architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2",
                "conv_kernel_size": checkpoint.variant.conv_kernel_size,
                "conv_group_size": checkpoint.variant.conv_group_size,
                "selector_rank": len(checkpoint.selector["hidden_projection.weight"]),
                "selector_top_k": checkpoint.variant.selector_top_k}  # fmt: skip
    file.write_text(json.dumps(raw))
    weights = path / (EXTRAS if kind == "native" else WEIGHTS)
    known = load_file(weights) if weights.exists() else {}
    mine = {f"candidate_selector.{k}": t.to(dtype) for k, t in checkpoint.selector.items()}
    if known | mine:
        save_file(known | mine, weights)


def random_drafter(model: dllm.DiffusionModel, **shape: Any) -> BlockCheckpoint:
    """One layer with random weights, of blocks of four, that reads the first layer of ``model``."""
    shape = {"layers": 1, "block_size": 4, "mask_token_id": MASK, "target_layer_ids": [0]} | shape
    torch.manual_seed(0)
    config = drafter_config(model.hf.config, **shape)
    return BlockCheckpoint("x", config, dict(new_drafter(config).state_dict()))


def random_weights(config: Any, variant: Variant = DFLASH) -> dict[str, torch.Tensor]:
    """Of a new drafter; DFlash 2's convolutions, like fresh ones, change nothing."""
    result = dict(new_drafter(config).state_dict())
    for name, shape in expected_weights(config, variant).items():
        if name.endswith("base_kernel"):
            result[name] = torch.zeros(shape)
            result[name][:, 0] = 1
        elif name not in result:
            result[name] = torch.zeros(shape)
    return result


def as_z_lab(path: Path, config: Any) -> None:
    """The config.json of z-lab's code for the network of a folder in speculators' format."""
    file = path / "config.json"
    raw = json.loads(file.read_text())
    second = {name: raw[name] for name in ("conv_kernel_size", "conv_group_size", "selector_rank",
                                           "selector_top_k") if name in raw}  # fmt: skip
    layers = raw["transformer_layer_config"]
    file.write_text(json.dumps(layers | {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "block_size": config.block_size, "num_target_layers": 2, "dtype": "bfloat16",
        "sliding_window": layers["sliding_window"] + 1,  # a row is part of its own window there
        "is_causal": False,
        "dflash_config": {"mask_token_id": config.mask_token_id,
                          "target_layer_ids": list(config.target_layer_ids), **second},
    }))  # fmt: skip


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
