"""What the config.json of a block drafter says, whichever of the three formats wrote it."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from transformers import MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant import modeling_muse_glimmer_assistant as theirs

from ...core.errors import CheckpointError, one_line, short
from ...models.native import rotation

STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
# sizes beyond it are damage: no drafter has such axes
Size = Annotated[int, Field(ge=1, lt=2**20)]
Whole = Annotated[int, Field(ge=0, lt=2**20)]
Number = Annotated[float, Field(ge=0, lt=1e9)]


@dataclass(frozen=True, config=STRICT)
class Variant:
    """What a network has beyond DFlash; the defaults are DFlash.

    ``conv_kernel_size`` rows (0: none) of the convolutions around every sublayer and the channels
    ``conv_group_size`` that share a kernel (DFlash 2); ``selector_top_k`` candidates of its
    selector; ``sample_from_anchor``: the anchor's row drafts as well, every row the token after its
    own; ``causal``: rows do not see the rows behind them; ``causal_windows``: nor do rows of
    sliding layers; ``anchored_windows``: a window reaches back from the anchor, not from the row;
    ``output_multiplier``, ``final_logit_softcapping`` and ``input_embedding_scale`` (None: as the
    verifier embeds) change logits and embeddings.
    """

    conv_kernel_size: Whole = 0
    conv_group_size: Size = 16
    selector_top_k: Size = 16
    sample_from_anchor: bool = False
    causal: bool = False
    causal_windows: bool = False
    anchored_windows: bool = False
    output_multiplier: Number = 1.0
    final_logit_softcapping: Number = 0.0
    input_embedding_scale: Number | None = None


DFLASH = Variant()


class Shape(BaseModel):
    """The layers, in the words of a Qwen3 config."""

    model_config = STRICT

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size = Field(default_factory=lambda seen: seen["num_attention_heads"])
    head_dim: Annotated[Size, Field(multiple_of=2)] = Field(
        default_factory=lambda seen: seen["hidden_size"] // seen["num_attention_heads"]
    )
    max_position_embeddings: Size | None = None
    rms_norm_eps: Number | None = None
    attention_dropout: Number | None = None
    hidden_act: Literal["silu", "gelu"] = "silu"
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    sliding_window: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    use_swa: bool | None = None
    swa_window_size: Size | None = None
    rope_theta: float = 10000.0


class Block(BaseModel):
    """The block of masks that it fills in, and the verifier's layers that it reads."""

    model_config = STRICT

    block_size: Size
    mask_token_id: Annotated[int, Field(ge=0, lt=2**31)]
    target_layer_ids: list[Whole] = Field(min_length=1)


def format_of(raw: Mapping[str, Any]) -> str | None:
    """Which format a config.json is of; None when it is no block drafter."""
    if raw.get("model_type") == "muse_glimmer_assistant":
        return "native"
    if raw.get("speculators_model_type") in ("dflash", "dspark", "dflash2"):
        return "speculators"
    names = raw.get("architectures")
    known = ("DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel", "Qwen3DSparkModel")
    named = isinstance(names, list) and any(name in known for name in names)
    return "z-lab" if named or isinstance(raw.get("dflash_config"), dict) else None


def read_config(
    raw: Mapping[str, Any], kind: str, name: str
) -> tuple[MuseGlimmerAssistantConfig, Variant]:
    """The network that ``raw`` of format ``kind`` describes; `CheckpointError` where none."""
    try:
        config, variant = _read(raw, kind)
        theirs.MuseGlimmerAssistantRotaryEmbedding(config)
    except Exception as error:  # transformers checks in its own ways, or computes with the values
        why = one_line(error, 200)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            why = f"{where}: {first['msg']}, not {short(first['input'])}"
        raise CheckpointError(
            f"config.json of {name} makes no block drafter ({why}); take it from the original "
            "checkpoint"
        ) from error
    return config, variant


def _read(raw: Mapping[str, Any], kind: str) -> tuple[MuseGlimmerAssistantConfig, Variant]:
    if kind == "native":  # says only what differs from its class
        known = {k: v for k, v in raw.items() if k not in ("architectures", "dflash_config")}
        raw = {**known, **MuseGlimmerAssistantConfig(**known).to_dict()}
    own = {**raw, **dict(raw.get("dflash_config") or {})}
    layers = own
    if kind == "speculators":
        layers = dict(own.get("transformer_layer_config") or {})
        # these count the embedding as layer 0
        own["target_layer_ids"] = [i - 1 for i in own.get("aux_hidden_state_layer_ids") or ()]
    shape, block = Shape.model_validate(layers), Block.model_validate(own)
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise ValueError(
            f"{shape.num_attention_heads} heads are no multiple of {shape.num_key_value_heads} "
            "heads of keys"
        )
    kinds = shape.layer_types or ["full_attention"] * shape.num_hidden_layers
    if shape.use_swa and "sliding_attention" not in kinds:
        kinds = ["sliding_attention"] * len(kinds)
    if len(kinds) != shape.num_hidden_layers:
        raise ValueError(f"layer_types has {len(kinds)} of {shape.num_hidden_layers} layers")
    rope = rotation({**layers, "rope_theta": shape.rope_theta}, kind)
    window = shape.swa_window_size or shape.sliding_window or 2048
    given = shape.model_dump(
        exclude_none=True,
        exclude={"layer_types", "sliding_window", "use_swa", "swa_window_size", "rope_theta"},
    )
    config = MuseGlimmerAssistantConfig(
        **given, **block.model_dump(), rope_parameters=rope, layer_types=[*kinds],
        # in z-lab's a row is part of its own window
        sliding_window=window - 1 if kind == "z-lab" else window,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return config, _variant(own, kind, shape.hidden_size, block.block_size)


def _variant(own: Mapping[str, Any], kind: str, width: int, block: int) -> Variant:
    given = {f.name: own[f.name] for f in fields(Variant) if own.get(f.name) is not None}
    if kind == "z-lab":
        # layers that `layer_types` calls sliding are causal there unless the config says otherwise
        names = ("is_causal", "causal", "causal_head")
        causal = next((own[name] for name in names if own.get(name) is not None), None)
        slides = "sliding_attention" in (own.get("layer_types") or ())
        given["causal"] = bool(causal)
        given["causal_windows"] = slides if causal is None else bool(causal)
        named = str(own.get("architectures"))
        if "DFlash2" in named:  # DFlash embeds as the verifier does
            given.setdefault("input_embedding_scale", 1.0)
        # DSpark's anchor drafts, as its authors train it
        dspark = "DSpark" in named or own.get("projector_type") == "dspark"
        given.setdefault("sample_from_anchor", dspark and not own.get("dspark_bonus_anchor"))
    elif kind == "speculators":
        second = own.get("speculators_model_type") == "dflash2"
        given["causal_windows"] = not own.get("sliding_window_non_causal", second)
        given.setdefault("sample_from_anchor", own.get("speculators_model_type") == "dspark")
        given |= {"anchored_windows": True, "input_embedding_scale": 1.0}
    variant = Variant(**given)
    kernel, group = variant.conv_kernel_size, variant.conv_group_size
    if kernel and (width % group or kernel > block):
        raise ValueError(
            f"convolutions of {kernel} rows over groups of {group} channels fit no block of "
            f"{block} rows of {width}"
        )
    if block < 2 and not variant.sample_from_anchor:
        raise ValueError("a block of one row drafts nothing")
    return variant
