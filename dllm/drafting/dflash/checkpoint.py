"""Checkpoints of block drafters: three formats in, one form inside.

``native``: transformers' own class (``MuseGlimmerAssistantModel``).  ``z-lab``: the authors'
(``DFlashDraftModel``), which names two weights differently.  ``speculators``: that of the package
of this name, perhaps with a trimmed vocabulary: ``t2d`` (V,) marks the verifier's ids that can be
drafted, ``d2t`` (v,) is each one's distance from its place among them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import MuseGlimmerAssistantConfig
from transformers.utils.hub import cached_file

from ...errors import CheckpointError, DllmError

Tensors = dict[str, torch.Tensor]
EXTRAS = "extras.safetensors"  # beside native weights: what transformers has no place for
WEIGHTS = "model.safetensors"
# z-lab and speculators name -> native name
RENAMED = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
# weights that speak of the verifier or of the vocabulary, not of the network
OTHERS = ("embed_tokens.weight", "lm_head.weight", "verifier_norm.weight",
          "verifier_lm_head.weight", "t2d", "d2t")  # fmt: skip
MARKOV = ("markov_w1.weight", "markov_w2.weight", "gate_proj.weight", "gate_proj.bias",
          "project_in.weight", "project_out.weight")  # fmt: skip
SELECTOR = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight",
            "project_in.weight", "project_out.weight")  # fmt: skip
SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act",
    "attention_dropout",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class BlockCheckpoint:
    """A block drafter: ``config`` and ``weights`` in transformers' form.  ``draft_ids`` (v,) are
    the ids it can draft, sorted (None: all), ``head`` (v, H) their rows where the checkpoint
    brings them; ``markov`` and ``selector`` are the weights of heads that look at the token
    before, under the names that `MARKOV` and `SELECTOR` list."""

    name: str
    config: MuseGlimmerAssistantConfig
    weights: Tensors
    draft_ids: torch.Tensor | None = None
    head: torch.Tensor | None = None
    markov: Tensors = field(default_factory=dict)
    selector: Tensors = field(default_factory=dict)


def format_of(raw: Mapping[str, Any]) -> str | None:
    """Which format a config.json is of; None when it is no block drafter."""
    if raw.get("model_type") == "muse_glimmer_assistant":
        return "native"
    if raw.get("speculators_model_type") in ("dflash", "dspark", "dflash2"):
        return "speculators"
    if "dflash_config" in raw or "DFlashDraftModel" in (raw.get("architectures") or ()):
        return "z-lab"
    return None


def is_block_drafter(name: object) -> bool:
    """Whether ``name`` is a folder or hub id with a block drafter.  Never raises."""
    if not isinstance(name, str | Path):
        return False
    raw = _config_file(str(name))
    return raw is not None and format_of(raw) is not None


def load_checkpoint(name: str | Path) -> BlockCheckpoint:
    """Read a folder or a repository of the hub.  Raises `CheckpointError` when it is no block
    drafter, lacks weights, or has parts that this library does not run."""
    name = str(name)
    raw = _config_file(name)
    kind = None if raw is None else format_of(raw)
    if raw is None or kind is None:
        raise CheckpointError(
            f"{name} is no DFlash checkpoint: its config.json is neither transformers' "
            "(muse_glimmer_assistant), nor z-lab's (dflash_config), nor that of speculators"
        )
    config = _config(raw, kind, name)
    tensors = _tensors(name)
    extras = _extras(name)
    network = {_native_name(key): value for key, value in tensors.items() if not _aside(key)}
    _check(network, config, name)
    trimmed = tensors | extras
    ids = draft_ids(trimmed)
    head = tensors.get("lm_head.weight") if ids is not None else None
    return BlockCheckpoint(
        name, config, network, ids, head,
        _part(trimmed, "markov_head.", MARKOV), _part(trimmed, "candidate_selector.", SELECTOR),
    )  # fmt: skip


def draft_ids(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The verifier's ids (v,) that a trimmed vocabulary holds, in its order; None for all."""
    if "d2t" in tensors:
        offsets = tensors["d2t"].long()
        return offsets + torch.arange(len(offsets))
    if "t2d" in tensors:
        return tensors["t2d"].nonzero()[:, 0]
    return None


def _config(raw: Mapping[str, Any], kind: str, name: str) -> MuseGlimmerAssistantConfig:
    if kind == "native":
        return MuseGlimmerAssistantConfig(**{k: v for k, v in raw.items() if k != "architectures"})
    if kind == "z-lab":
        shape: Mapping[str, Any] = raw
        own = {**raw, **raw.get("dflash_config", {})}
        taps = own.get("target_layer_ids")
    else:
        shape, own = raw["transformer_layer_config"], dict(raw)
        aux = raw.get("aux_hidden_state_layer_ids")
        taps = None if aux is None else [layer - 1 for layer in aux]  # counts the embedding as 0
    if taps is None or own.get("mask_token_id") is None or "block_size" not in own:
        raise CheckpointError(
            f"{name}: config.json does not say block size, mask token and tapped layers"
        )
    for odd in ("output_multiplier", "final_logit_softcapping", "conv_kernel_size"):
        if own.get(odd) not in (None, 1, 1.0):
            raise CheckpointError(f"{name} is a DFlash 2 network ({odd}): only DFlash runs here")
    if own.get("sample_from_anchor") or own.get("projector_type", "dflash") != "dflash":
        raise CheckpointError(
            f"{name} drafts from the anchor's own row or has a Domino head: only DFlash runs here"
        )
    layers = shape["num_hidden_layers"]
    given = {key: shape[key] for key in SHAPE if key in shape}
    given.setdefault("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    rope = shape.get("rope_parameters") or {
        "rope_type": "default", "rope_theta": shape.get("rope_theta", 10000.0),
        **(shape.get("rope_scaling") or {}),
    }  # fmt: skip
    return MuseGlimmerAssistantConfig(
        **given, rope_parameters=dict(rope), block_size=own["block_size"],
        mask_token_id=own["mask_token_id"], target_layer_ids=list(taps),
        layer_types=shape.get("layer_types") or ["full_attention"] * layers,
        sliding_window=shape.get("sliding_window") or 2048,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def _config_file(name: str) -> dict[str, Any] | None:
    """config.json of a folder or hub repository; None where there is none to be had."""
    try:
        path = Path(name) / "config.json" if Path(name).is_dir() else _hub_file(name, "config.json")
        return dict(json.loads(Path(path).read_text(encoding="utf-8"))) if path else None
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


def _tensors(name: str) -> Tensors:
    """Weights of one file or of the shards that its index lists; safetensors only."""
    folder = Path(name).is_dir()

    def file(one: str) -> Path | None:
        at = str(Path(name) / one) if folder else _hub_file(name, one)
        return Path(at) if at is not None and Path(at).is_file() else None

    whole = file(WEIGHTS)
    if whole is not None:
        return dict(load_file(whole))
    index = file(WEIGHTS + ".index.json")
    if index is None:
        raise CheckpointError(f"{name} has no {WEIGHTS}: only safetensors are loaded")
    result: Tensors = {}
    for shard in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())):
        part = file(shard)
        if part is None:
            raise CheckpointError(f"{name} lacks {shard}, which its index names")
        result |= load_file(part)
    return result


def _extras(name: str) -> Tensors:
    at = Path(name) / EXTRAS if Path(name).is_dir() else _hub_file(name, EXTRAS)
    return dict(load_file(at)) if at and Path(at).is_file() else {}


def _aside(key: str) -> bool:
    return key in OTHERS or key.startswith(("markov_head.", "candidate_selector.", "rotary_emb."))


def _native_name(key: str) -> str:
    key = key.removeprefix("model.")
    return next((new + key[len(old) :] for old, new in RENAMED.items() if key.startswith(old)), key)


def _part(tensors: Mapping[str, torch.Tensor], prefix: str, names: tuple[str, ...]) -> Tensors:
    return {name: tensors[prefix + name] for name in names if prefix + name in tensors}


def expected_weights(config: MuseGlimmerAssistantConfig) -> dict[str, tuple[int, ...]]:
    """Native name and shape of every weight of a network with this config."""
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
    taps = len(config.target_layer_ids or ())
    result: dict[str, tuple[int, ...]] = {
        "encoder.fc.weight": (width, taps * width), "encoder.output_norm_enc.weight": (width,),
        "norm.weight": (width,),
    }  # fmt: skip
    for i in range(config.num_hidden_layers):
        result |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return result


def _check(weights: Tensors, config: MuseGlimmerAssistantConfig, name: str) -> None:
    expected = expected_weights(config)
    missing, odd = sorted(expected.keys() - weights), sorted(weights.keys() - expected)
    wrong = [k for k in expected.keys() & weights if tuple(weights[k].shape) != expected[k]]
    for what, keys in (("lacks", missing), ("has unknown", odd), ("has misshapen", sorted(wrong))):
        if keys:
            raise CheckpointError(f"{name} {what} weights: {', '.join(keys[:3])} ({len(keys)})")
