"""What the small files of a checkpoint may say, checked before anything is made of it.

A field of another type than these would be noticed much later, or never: one sentence per file
instead.  Fields that are not listed belong to the family or to transformers.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from ..core.errors import CheckpointError, short

DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")
MOST = 2**31  # ids and sizes beyond it are damage: no network has such axes
Check = tuple[Callable[[Any], bool], str]


def _whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < MOST


def _list(value: Any, least: int = 0) -> bool:
    return isinstance(value, list | tuple) and all(_whole(item, least) for item in value)


ID: Check = (lambda value: _whole(value, -MOST), "a whole number")  # the range: see `read_facts`
IDS: Check = (
    lambda value: _whole(value, -MOST) or _list(value, -MOST),
    "a token id or a list of token ids",
)
LIST: Check = (_list, "a list of token ids")
SIZE: Check = (lambda value: _whole(value, 1), f"a whole number from 1 to {MOST - 1}")
SHIFT: Check = (lambda value: value in (0, 1) and _whole(value), "0 or 1")
POSITIVE: Check = (
    lambda value: type(value) in (int, float) and 0 < value < float("inf"),
    "a positive number",
)
NAME: Check = (lambda value: isinstance(value, str) and bool(value), "a name")
NAMES: Check = (
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "a list of names",
)
OBJECT: Check = (lambda value: isinstance(value, dict), "an object")
DTYPE: Check = (
    lambda value: isinstance(value, str) and value.removeprefix("torch.") in DTYPES,
    f"one of {', '.join(DTYPES)}",
)
SOURCE: Check = (lambda value: value in ("clean", "tempered"), "'clean' or 'tempered'")

GENERATION: Mapping[str, Check] = {
    "eos_token_id": IDS, "mask_token_id": ID, "pad_token_id": ID, "bos_token_id": ID,
    "max_new_tokens": SIZE, "block_length": SIZE, "delimiters": LIST, "expand_token_id": ID,
}  # fmt: skip
FACTS: Mapping[str, Check] = {  # those that a caller of `load` may state
    "mask_token_id": ID, "eos_token_id": IDS, "stop_token_ids": LIST, "pad_token_id": ID,
    "bos_token_id": ID, "logit_shift": SHIFT, "context_length": SIZE, "score_source": SOURCE,
    "block_length": SIZE, "expand_token_id": ID,
}  # fmt: skip
SECTION: Mapping[str, Check] = {
    **FACTS, "family": NAME, "generation": OBJECT, "official_config": OBJECT,
}  # fmt: skip
# Sizes of networks, under the names that official and native configurations give them.
SIZES = (
    "vocab_size", "embedding_size", "hidden_size", "d_model", "intermediate_size",
    "mlp_hidden_size", "num_hidden_layers", "n_layers", "num_attention_heads", "n_heads",
    "head_dim", "max_position_embeddings", "max_sequence_length", "block_size", "bd_size",
    "moe_intermediate_size", "expert_intermediate_size", "num_experts", "num_experts_per_tok",
)  # fmt: skip
CONFIG: Mapping[str, Check] = {
    "architectures": NAMES, "model_type": NAME, "torch_dtype": DTYPE, "dtype": DTYPE,
    "mask_token_id": ID, "eos_token_id": IDS, "pad_token_id": IDS, "bos_token_id": IDS,
    "expand_token_id": ID, "dllm": OBJECT, "quantization_config": OBJECT, "auto_map": OBJECT,
    "rope_scaling": OBJECT, "rope_parameters": OBJECT,
    "rope_theta": POSITIVE, "rms_norm_eps": POSITIVE, "partial_rotary_factor": POSITIVE,
    **dict.fromkeys(SIZES, SIZE),
}  # fmt: skip


def own_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``dllm`` section of a ``config.json``, empty where there is none."""
    return cast(Mapping[str, Any], config.get("dllm") or {})


def check_config(config: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` on a field of ``config.json`` that no checkpoint can mean."""
    check(config, CONFIG, "config.json")
    section = own_section(config)
    check(section, SECTION, 'the "dllm" section of config.json')
    check(
        section.get("generation") or {}, GENERATION,
        'the "generation" entry of the "dllm" section of config.json',
    )  # fmt: skip


def check(content: Mapping[str, Any], table: Mapping[str, Check], where: str) -> None:
    """Raise `CheckpointError` on a field of ``content`` that is not as ``table`` wants it."""
    for name, (fits, words) in table.items():
        value = content.get(name)
        if value is not None and not fits(value):
            raise CheckpointError(
                f"{where} has {name}={short(value)}, which must be {words}; "
                "take the file from the original checkpoint"
            )
