"""Checkpoints of block drafters: three formats in, one form inside.

``native``: transformers' own class (``MuseGlimmerAssistantModel``).  ``z-lab``: the authors'
(``DFlashDraftModel``), which names two weights differently; SpecForge writes it as well.
``speculators``: that of the package of this name, perhaps with a trimmed vocabulary: ``t2d`` (V,)
marks the verifier's ids that can be drafted, ``d2t`` (v,) is each one's distance from its place
among them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import MuseGlimmerAssistantConfig
from transformers.utils.hub import cached_file

from ...core.errors import CheckpointError, DllmError, one_line
from ...models.checkpoint import Checkpoint, find, read_json
from ...models.headers import weight_files
from .config import DFLASH, Variant, format_of, read_config

Tensors = dict[str, torch.Tensor]
EXTRAS = "extras.safetensors"  # beside native weights: what transformers has no place for
WEIGHTS = "model.safetensors"
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
    if not isinstance(name, str | Path):
        return False
    raw = _config_file(str(name))
    return raw is not None and format_of(raw) is not None


def load_checkpoint(name: str | Path) -> BlockCheckpoint:
    """Read a folder or a repository of the hub.  Raises `CheckpointError` when it is no block
    drafter, is damaged, lacks weights, or has parts that this library does not run."""
    name = str(name)
    raw = _config_file(name)
    kind = None if raw is None else format_of(raw)
    if raw is None or kind is None:
        raise CheckpointError(
            f"{name} is no DFlash checkpoint: its config.json is neither transformers' "
            "(muse_glimmer_assistant), nor z-lab's (dflash_config), nor that of speculators"
        )
    config, variant = read_config(raw, kind, name)
    folder, hub = find(name)
    folder = Checkpoint(name, folder, raw, {}, hub).with_weights()
    tensors: Tensors = {}
    for file in weight_files(folder):
        tensors |= _tensors(file)
    if (folder / EXTRAS).is_file():
        tensors |= _tensors(folder / EXTRAS)
    tensors = {_plain_name(key): value for key, value in tensors.items()}
    odd = next((key for key in tensors if key.startswith(UNKNOWN)), None)
    if odd is not None:
        raise CheckpointError(
            f"{name} brings a gated, recurrent or Domino head ({odd}), which is not supported: "
            "train one without"
        )
    for key, value in tensors.items():
        if key not in ("t2d", "d2t") and not (value.is_floating_point() and _finite(value)):
            raise CheckpointError(
                f"{key} of {name} holds no finite floating-point numbers; download it again"
            )
    network = {_native_name(key): value for key, value in tensors.items() if not _aside(key)}
    _check(network, expected_weights(config, variant, len(network)), name)
    ids = _draft_ids(tensors, name)
    head = tensors.get("lm_head.weight") if ids is not None else None
    if head is not None and (ids is None or head.shape != (len(ids), config.hidden_size)):
        raise CheckpointError(f"lm_head of {name} has no row for each of the ids it drafts")
    part = {prefix: _part(tensors, prefix) for prefix in HEADS}
    return BlockCheckpoint(
        name, config, network, ids, head, part["markov_head."], part["candidate_selector."],
        variant, part["confidence_head."],
    )  # fmt: skip


def draft_ids(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The verifier's ids (v,) that a trimmed vocabulary holds, in its order; None for all."""
    if "d2t" in tensors:
        offsets = tensors["d2t"].long()
        return offsets + torch.arange(len(offsets))
    if "t2d" in tensors:
        return tensors["t2d"].nonzero()[:, 0]
    return None


def _draft_ids(tensors: Tensors, name: str) -> torch.Tensor | None:
    for key, value in tensors.items():
        if key in ("t2d", "d2t") and (value.dim() != 1 or value.is_floating_point()):
            raise CheckpointError(f"{key} of {name} is no list of ids; download it again")
    ids = draft_ids(tensors)
    if ids is not None and (not len(ids) or ids[0] < 0 or bool((ids.diff() <= 0).any())):
        raise CheckpointError(f"the ids that {name} drafts do not rise; download it again")
    return ids


def _config_file(name: str) -> dict[str, Any] | None:
    """config.json of a folder or hub repository; None where there is none to be had."""
    try:
        path = Path(name) / "config.json" if Path(name).is_dir() else _hub_file(name, "config.json")
        return None if path is None else read_json(Path(path))
    except (OSError, ValueError, DllmError):
        return None


def _hub_file(name: str, file: str) -> str | None:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    found: str | None = cached_file(
        name, file, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
    )  # fmt: skip
    return found


def _tensors(file: Path) -> Tensors:
    try:
        return dict(load_file(file))
    except Exception as error:  # safetensors and torch have types of their own
        raise CheckpointError(
            f"the weight file {file} is truncated or corrupt ({one_line(error, 120)}); download it "
            "again"
        ) from error


def _finite(value: torch.Tensor) -> bool:
    return bool(torch.isfinite(value.float().sum())) or bool(value.isfinite().all())


def _plain_name(key: str) -> str:
    """A name without the containers that engines wrap around networks and heads."""
    key = key.removeprefix("model.").removeprefix("logit_head.")
    return key.removesuffix(".weight") if key.endswith("_codebook.weight") else key


def _aside(key: str) -> bool:
    return key in OTHERS or key.startswith((*HEADS, "rotary_emb."))


def _native_name(key: str) -> str:
    return next((new + key[len(old) :] for old, new in RENAMED.items() if key.startswith(old)), key)


def _part(tensors: Mapping[str, torch.Tensor], prefix: str) -> Tensors:
    return {name: tensors[prefix + name] for name in HEADS[prefix] if prefix + name in tensors}


def expected_weights(
    config: MuseGlimmerAssistantConfig, variant: Variant = DFLASH, most: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Native name and shape of every weight of a network with this config, of at most ``most``
    layers and one."""
    width, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    layer = {
        "self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width), "self_attn.o_proj": (width, q),
        "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner), "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }  # fmt: skip
    read = len(config.target_layer_ids or ())
    result: dict[str, tuple[int, ...]] = {
        "encoder.fc.weight": (width, read * width), "encoder.output_norm_enc.weight": (width,),
        "norm.weight": (width,),
    }  # fmt: skip
    layers = config.num_hidden_layers
    for i in range(layers if most is None else min(layers, most + 1)):
        result |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        kernel = variant.conv_kernel_size
        for place in ("attention_conv", "mlp_conv") if kernel else ():
            rows = 2 * kernel * (width // variant.conv_group_size)
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
