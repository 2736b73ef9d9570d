"""What the config.json of a block drafter says, whichever of the three formats wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from transformers import MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
    MuseGlimmerAssistantRotaryEmbedding,
)

from ...core.errors import CheckpointError, one_line, short

SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
SHAPE = (*SIZES, "rms_norm_eps", "hidden_act", "attention_dropout")
LAYER_TYPES = ("full_attention", "sliding_attention")
MOST = 2**20  # sizes beyond it are damage: no drafter has such axes
ACTIVATIONS = ("silu", "gelu")


@dataclass(frozen=True)
class Variant:
    """What a network has beyond DFlash; the defaults are DFlash.

    ``conv_kernel_size`` taps (0: none) of the convolutions around every sublayer and the channels
    ``conv_group_size`` that share a kernel (DFlash 2); ``selector_top_k`` candidates of its
    selector; ``sample_from_anchor``: the anchor's row drafts as well, every row the token after its
    own; ``causal_windows``: rows of sliding layers do not see the rows behind them;
    ``anchored_windows``: a window reaches back from the anchor, not from the row;
    ``output_multiplier``, ``final_logit_softcapping`` and ``input_embedding_scale`` (None: as the
    verifier embeds) change logits and embeddings.
    """

    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_top_k: int = 16
    sample_from_anchor: bool = False
    causal_windows: bool = False
    anchored_windows: bool = False
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    input_embedding_scale: float | None = None

    def changed(self) -> dict[str, Any]:
        """The fields that differ from DFlash, for a config.json."""
        return {k: v for k, v in asdict(self).items() if v != getattr(DFLASH, k)}


DFLASH = Variant()


def format_of(raw: Mapping[str, Any]) -> str | None:
    """Which format a config.json is of; None when it is no block drafter."""
    if raw.get("model_type") == "muse_glimmer_assistant":
        return "native"
    if raw.get("speculators_model_type") in ("dflash", "dspark", "dflash2"):
        return "speculators"
    names = raw.get("architectures")
    named = isinstance(names, list) and any(
        name in ("DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel") for name in names
    )
    return "z-lab" if named or isinstance(raw.get("dflash_config"), dict) else None


def read_config(
    raw: Mapping[str, Any], kind: str, name: str
) -> tuple[MuseGlimmerAssistantConfig, Variant]:
    """The network that ``raw`` of format ``kind`` describes.  Raises `CheckpointError` in one
    sentence for whatever makes none."""
    try:
        config, variant = _read(raw, kind, name)
        MuseGlimmerAssistantRotaryEmbedding(config)
    except CheckpointError:
        raise
    except Exception as error:  # transformers checks in its own ways, or computes with the values
        raise CheckpointError(
            f"config.json of {name} makes no block drafter ({one_line(error, 200)}); take it from "
            "the original checkpoint"
        ) from error
    return config, variant


def _read(
    raw: Mapping[str, Any], kind: str, name: str
) -> tuple[MuseGlimmerAssistantConfig, Variant]:
    if kind == "native":  # says only what differs from its class
        known = {k: v for k, v in raw.items() if k not in ("architectures", "dflash_config")}
        raw = {**known, **MuseGlimmerAssistantConfig(**known).to_dict()}
    own: Mapping[str, Any] = {**raw, **(_object(raw, "dflash_config", name) or {})}
    shape = own
    if kind == "speculators":
        shape = _object(raw, "transformer_layer_config", name) or {}
    taps: Any = own.get("target_layer_ids")
    if kind == "speculators":
        taps = own.get("aux_hidden_state_layer_ids")
        if _ids(taps, least=1):
            taps = [layer - 1 for layer in taps]  # these count the embedding as layer 0
    if taps is None or own.get("mask_token_id") is None or "block_size" not in own:
        raise CheckpointError(
            f"{name}: config.json does not say block size, mask token and tapped layers"
        )
    given = {key: shape[key] for key in SHAPE if key in shape}
    _whole(given, SIZES, name, least=1)
    for key in SIZES[:4]:
        if key not in given:
            raise CheckpointError(f"{name}: config.json does not say {key}")
    _whole(own, ("block_size",), name, least=1)
    _whole(own, ("mask_token_id",), name, most=2**31)
    if not taps or not _ids(taps):
        raise CheckpointError(
            f"{name}: the tapped layers are a list of layer numbers, not {short(taps)}"
        )
    given.setdefault("num_key_value_heads", given["num_attention_heads"])
    given.setdefault("head_dim", given["hidden_size"] // given["num_attention_heads"])
    if given["num_attention_heads"] % given["num_key_value_heads"] or given["head_dim"] % 2:
        raise CheckpointError(
            f"{name}: config.json asks for {given['num_attention_heads']} heads over "
            f"{given['num_key_value_heads']} of keys, each of {given['head_dim']} numbers: the "
            "first must be a multiple of the second, the third even"
        )
    activation = given.setdefault("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{name}: hidden_act is one of {', '.join(ACTIVATIONS)}, not {short(activation)}"
        )
    layers = given["num_hidden_layers"]
    kinds = shape.get("layer_types")
    if kinds is None:
        kinds = ["full_attention"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or not all(
        known in LAYER_TYPES for known in kinds
    ):  # fmt: skip
        raise CheckpointError(
            f"{name}: layer_types says {' or '.join(LAYER_TYPES)} for each of {layers} layers, not "
            f"{short(kinds)}"
        )
    window = shape.get("sliding_window") or 2048
    _whole({"sliding_window": window}, ("sliding_window",), name, least=1, most=2**31)
    if kind == "z-lab":
        window -= 1  # there a row is part of its own window
    rope = shape.get("rope_parameters") or {
        "rope_type": "default", "rope_theta": shape.get("rope_theta", 10000.0),
        **(_object(shape, "rope_scaling", name) or {}),
    }  # fmt: skip
    config = MuseGlimmerAssistantConfig(
        **given, rope_parameters=dict(rope), block_size=own["block_size"],
        mask_token_id=own["mask_token_id"], target_layer_ids=list(taps), layer_types=kinds,
        sliding_window=window, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return config, _variant(own, kind, name)


def _variant(own: Mapping[str, Any], kind: str, name: str) -> Variant:
    known = {field.name for field in fields(Variant)}
    given = {key: own[key] for key in known if own.get(key) is not None}
    if kind == "z-lab":
        # sliding layers are causal there unless the config says otherwise
        given["causal_windows"] = own.get("is_causal") is not False
        given.setdefault("input_embedding_scale", 1.0)
    elif kind == "speculators":
        second = own.get("speculators_model_type") == "dflash2"
        given["causal_windows"] = not own.get("sliding_window_non_causal", second)
        given.setdefault("sample_from_anchor", own.get("speculators_model_type") == "dspark")
        given |= {"anchored_windows": True, "input_embedding_scale": 1.0}
    _whole(given, ("conv_kernel_size",), name)
    _whole(given, ("conv_group_size", "selector_top_k"), name, least=1)
    for key in ("sample_from_anchor", "causal_windows", "anchored_windows"):
        if not isinstance(given.get(key, False), bool):
            raise CheckpointError(f"{name}: {key} is true or false, not {short(given[key])}")
    for key in ("output_multiplier", "final_logit_softcapping", "input_embedding_scale"):
        value = given.get(key, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise CheckpointError(f"{name}: {key} is a positive number, not {short(value)}")
    variant = Variant(**given)
    width: Any = own.get("hidden_size")
    block = own["block_size"]
    if kind == "speculators":
        width = own["transformer_layer_config"]["hidden_size"]
    if variant.conv_kernel_size and (
        width % variant.conv_group_size or variant.conv_kernel_size > block
    ):
        raise CheckpointError(
            f"{name}: convolutions of {variant.conv_kernel_size} taps over groups of "
            f"{variant.conv_group_size} channels fit no block of {block} rows of {width}"
        )
    if block < 2 and not variant.sample_from_anchor:
        raise CheckpointError(f"{name}: a block of one row drafts nothing")
    return variant


def _object(raw: Mapping[str, Any], key: str, name: str) -> dict[str, Any] | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{name}: {key} in config.json is an object, not {short(value)}")
    return value


def _ids(value: Any, least: int = 0) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and least <= item < MOST
        for item in value
    )


def _whole(
    given: Mapping[str, Any], keys: Sequence[str], name: str, least: int = 0, most: int = MOST
) -> None:
    for key in keys:
        value = given.get(key, least)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < most:
            raise CheckpointError(
                f"{name}: {key} in config.json is a whole number from {least} to {most - 1}, not "
                f"{short(value)}"
            )
