"""Checkpoints of block drafters: three formats in, one form inside.

``native``: transformers' own class (``MuseGlimmerAssistantModel``).  ``z-lab``: the authors'
(``DFlashDraftModel``), which names two weights differently; SpecForge writes it as well.
``speculators``: that of the package of this name, perhaps with a trimmed vocabulary: ``t2d`` (V,)
marks the verifier's ids that can be drafted, ``d2t`` (v,) is how far each is from its place.
"""

import copy
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.utils.hub import cached_file

from ...core.errors import CheckpointError, DllmError
from ...models.checkpoint import Checkpoint, find, read_json, snapshot
from ...models.headers import is_finite, read_headers, read_tensors, weight_files
from .config import DFLASH, Variant, format_of, read_config

Tensors = dict[str, torch.Tensor]
EXTRAS = "extras.safetensors"  # beside native weights: what transformers has no place for
WEIGHTS = "model.safetensors"
MASK = "mask_embedding.pt"  # fetched to be spoken of, never read
# z-lab and speculators name -> native name
RENAMED = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
# weights that speak of the verifier or of the vocabulary, not of the network
OTHERS = ("embed_tokens.weight", "lm_head.weight", "verifier_norm.weight",
          "verifier_lm_head.weight", "t2d", "d2t")  # fmt: skip
# heads beside the network: prefix in the file -> names of its weights
HEADS: Mapping[str, tuple[str, ...]] = {
    "markov_head.": ("markov_w1.weight", "markov_w2.weight", "project_in.weight",
                     "project_out.weight"),
    "candidate_selector.": ("predecessor_codebook", "successor_codebook",
                            "hidden_projection.weight"),
    "confidence_head.": ("proj.weight", "proj.bias"),
}  # fmt: skip
# heads that this library does not run: their weights say more than the ones above
UNKNOWN = ("markov_head.gate_proj.", "markov_head.joint_proj.", "prefix_gru.", "embed_proj.")


@dataclass(frozen=True, eq=False)
class BlockCheckpoint:
    """A block drafter: ``config`` and ``weights`` in transformers' form, ``variant`` what it has
    beyond DFlash.  ``draft_ids`` (v,) are the ids it can draft, sorted (None: all), ``head``
    (v, H) their rows where the checkpoint brings them.  Of the heads that look at the token before
    ``markov`` and ``selector`` hold the weights; ``confidence`` is DSpark's linear head.  Names:
    `HEADS`."""

    name: str
    config: MuseGlimmerAssistantConfig
    weights: Tensors
    draft_ids: torch.Tensor | None = None
    head: torch.Tensor | None = None
    markov: Tensors = field(default_factory=dict)
    selector: Tensors = field(default_factory=dict)
    variant: Variant = DFLASH
    confidence: Tensors = field(default_factory=dict)

    @property
    def walks(self) -> bool:
        """Whether it brings a head that looks at the token before."""
        return bool(self.markov or self.selector)


def is_block_drafter(name: object) -> bool:
    """Whether ``name`` is a folder or hub id with a block drafter.  Never raises."""
    return isinstance(name, str | Path) and format_of(_config_file(str(name)) or {}) is not None


def load_checkpoint(name: str | Path) -> BlockCheckpoint:
    """Read a folder or a repository of the hub.  Raises `CheckpointError` when it is no block
    drafter, is damaged, lacks weights, or has parts that this library does not run."""
    name = str(name)
    raw = _config_file(name) or {}
    kind = format_of(raw)
    if kind is None:
        raise CheckpointError(
            f"{name} is no DFlash checkpoint: its config.json is neither transformers' "
            "(muse_glimmer_assistant), nor z-lab's (dflash_config), nor that of speculators"
        )
    config, variant = read_config(raw, kind, name)
    folder, hub = find(name)
    folder = Checkpoint(name, folder, raw, {}, hub).with_weights()
    if hub is not None:
        snapshot(hub, None, (MASK,))
    if (folder / MASK).is_file():
        warnings.warn(
            f"{name} keeps its mask's embedding in {MASK}, a pickle, which is not read: its drafts "
            f"are worse; copy it to row {config.mask_token_id} of the verifier's embedding",
            RuntimeWarning,
            stacklevel=2,
        )
    tensors: Tensors = {}
    read_headers(folder)  # every weight stands in one file
    for file in (*weight_files(folder), *folder.glob(EXTRAS)):
        tensors |= read_tensors(file)
    tensors = {_plain_name(key): value for key, value in tensors.items()}
    odd = next((key for key in tensors if key.startswith(UNKNOWN)), None)
    if odd is not None:
        raise CheckpointError(
            f"{name} brings a gated, recurrent or Domino head ({odd}), which is not supported: "
            "train one without"
        )
    for key, value in tensors.items():
        if key not in ("t2d", "d2t") and not (value.is_floating_point() and is_finite(value)):
            raise CheckpointError(
                f"{key} of {name} holds no finite floating-point numbers; download it again"
            )
    network = {
        _native_name(key): value for key, value in tensors.items()
        if key not in OTHERS and not key.startswith((*HEADS, "rotary_emb."))
    }  # fmt: skip
    _check(network, expected_weights(config, variant, len(network)), name)
    ids = draft_ids(tensors, name)
    head = tensors.get("lm_head.weight") if ids is not None else None
    if head is not None and (ids is None or head.shape != (len(ids), config.hidden_size)):
        raise CheckpointError(f"lm_head of {name} has no row for each of the ids it drafts")
    part = {
        prefix: {name: tensors[prefix + name] for name in names if prefix + name in tensors}
        for prefix, names in HEADS.items()
    }
    return BlockCheckpoint(
        name, config, network, ids, head, part["markov_head."], part["candidate_selector."],
        variant, part["confidence_head."],
    )  # fmt: skip


def draft_ids(tensors: Tensors, name: str) -> torch.Tensor | None:
    """The verifier's ids (v,) that a trimmed vocabulary holds, in its order; None for all.  Raises
    `CheckpointError` for what is no such list."""
    for key in ("t2d", "d2t"):
        if key in tensors and (tensors[key].dim() != 1 or tensors[key].is_floating_point()):
            raise CheckpointError(f"{key} of {name} is no list of ids; download it again")
    if "d2t" in tensors:
        ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    elif "t2d" in tensors:
        ids = tensors["t2d"].nonzero()[:, 0]
    else:
        return None
    if not len(ids) or ids[0] < 0 or bool((ids.diff() <= 0).any()):
        raise CheckpointError(f"the ids that {name} drafts do not rise; download it again")
    return ids


def _config_file(name: str) -> dict[str, Any] | None:
    """config.json of a folder or hub repository; None where there is none to be had."""
    with suppress(OSError, ValueError, DllmError):
        if Path(name).is_dir() or re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            file = cached_file(name, "config.json")
            return None if file is None else read_json(Path(file))
    return None


def _plain_name(key: str) -> str:
    """A name without the containers that engines wrap around networks and heads."""
    key = key.removeprefix("model.").removeprefix("logit_head.")
    return key.removesuffix(".weight") if key.endswith("_codebook.weight") else key


def _native_name(key: str) -> str:
    return next((new + key[len(old) :] for old, new in RENAMED.items() if key.startswith(old)), key)


def expected_weights(
    config: MuseGlimmerAssistantConfig, variant: Variant = DFLASH, most: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Native name and shape of every weight of such a network, of ``most`` + 1 layers at most."""
    few: Any = copy.deepcopy(config)
    if most is not None and few.num_hidden_layers > most:
        few.num_hidden_layers, few.layer_types = most + 1, few.layer_types[: most + 1]
    with torch.device("meta"):
        network: Any = MuseGlimmerAssistantModel(few)
    result = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    kernel, width = variant.conv_kernel_size, config.hidden_size
    for i in range(few.num_hidden_layers if kernel else 0):
        rows = 2 * kernel * (width // variant.conv_group_size)
        for place in ("attention_conv", "mlp_conv"):
            result[f"layers.{i}.{place}.base_kernel"] = (2, kernel, width)
            result[f"layers.{i}.{place}.kernel_projection.weight"] = (rows, width)
    return result


def _check(weights: Tensors, expected: Mapping[str, tuple[int, ...]], name: str) -> None:
    missing, odd = sorted(expected.keys() - weights), sorted(weights.keys() - expected)
    wrong = [k for k in expected.keys() & weights if tuple(weights[k].shape) != expected[k]]
    for what, keys in (("lacks", missing), ("has unknown", odd), ("has misshapen", sorted(wrong))):
        if keys:
            named = ", ".join(key[:60] for key in keys[:3])
            raise CheckpointError(f"{name} {what} weights: {named} ({len(keys)})")
