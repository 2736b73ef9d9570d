"""Writing a model so that it can be read back exactly, in the native or the official layout."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict

from ..core.errors import ConfigError, UnknownNameError
from .quantisation import of_config

IDS = ("mask_token_id", "eos_token_id", "pad_token_id", "bos_token_id", "expand_token_id")
LAYOUTS = ("native", "official")
DTYPE_NAMES = ("torch_dtype", "dtype")  # old and new spelling in config.json


def save(
    model: Any, folder: str | os.PathLike[str], layout: str, max_shard_size: int | str
) -> None:
    """See `DiffusionModel.save_pretrained`."""
    if layout not in LAYOUTS:
        raise UnknownNameError("layout", layout, LAYOUTS)
    if layout == "official" and model.family.to_official is None:
        raise ConfigError(
            f"family {model.family.name!r} has no official layout of its own; "
            'save with layout="native"'
        )
    config = _official_config(model) if layout == "official" else _native_config(model)
    weights = _weights(model)
    if layout == "official":
        weights = {model.family.official_key(key): value for key, value in weights.items()}
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    try:
        save_torch_state_dict(
            weights, path, filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size, metadata={"format": "pt"},
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"max_shard_size is a number of bytes or a text such as '5GB', not {max_shard_size!r}"
        ) from error
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (path / "config.json").write_text(text, encoding="utf-8")
    hf: Any = model.hf
    if hf.can_generate():
        hf.generation_config.to_json_file(path / "generation_config.json")
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(path)


def _weights(model: Any) -> dict[str, torch.Tensor]:
    hf: Any = model.hf
    stored = getattr(hf.config, "quantization_config", None)
    if getattr(hf, "hf_quantizer", None) is not None and of_config(stored) is None:
        raise ConfigError(
            "a model that transformers quantised cannot be written back exactly; load it with "
            "quantization= instead, or without, and save that"
        )
    weights: dict[str, torch.Tensor] = hf.state_dict()
    if of_config(stored) is None and any(key.endswith(".numbers") for key in weights):
        raise ConfigError("this model was read from a GGUF file, which is its only form: keep it")
    if any(".base_layer." in key for key in weights):
        raise ConfigError(
            "an adapter lies beside these weights: load with merge_adapter=True and save that, or "
            "keep the model and its adapter as they are"
        )
    if any(value.is_meta for value in weights.values()):
        raise ConfigError("part of the model is offloaded; load it without offloading and save it")
    for key, source in hf.all_tied_weights_keys.items() if hf.config.tie_word_embeddings else ():
        value = weights.pop(key, None)
        if value is not None and not torch.equal(value, weights.get(source, value)):
            raise ConfigError(
                f"{key} differs from {source}, with which config.json says that it is tied: set "
                "model.hf.config.tie_word_embeddings = False"
            )
    first = {value.data_ptr(): key for key, value in reversed(weights.items())}
    return {  # a file has no weights that share memory
        key: value if first[value.data_ptr()] == key else value.clone()
        for key, value in weights.items()
    }


def _native_config(model: Any) -> dict[str, Any]:
    facts = asdict(model.facts)
    section = {name: facts[name] for name in (
        *IDS, "stop_token_ids", "logit_shift", "context_length", "score_source", "block_length",
    )}  # fmt: skip
    section |= {"family": model.family.name, "generation": dict(model.generation_defaults)}
    if model.official_config:
        section["official_config"] = dict(model.official_config)
    config: dict[str, Any] = model.hf.config.to_dict()
    config.pop("_name_or_path", None)  # where this machine kept it is nobody's business
    kind = type(model.hf).__name__
    return config | {"architectures": [kind], "dtype": _dtype(model), "dllm": section}


def _official_config(model: Any) -> dict[str, Any]:
    """The original fields, with those replaced that have changed since."""
    family, original = model.family, dict[str, Any](model.official_config)
    original.pop("quantization_config", None)  # may hold no longer: what does is below
    current: dict[str, Any] = family.to_official(model.hf.config)
    if original:
        before = family.to_official(family.to_native(original))
        current = {name: value for name, value in current.items() if value != before[name]}
    ids = {name: getattr(model.facts, name) for name in IDS}
    changed = {name: value for name, value in ids.items() if value != _first(original.get(name))}
    spelling = next((name for name in DTYPE_NAMES if name in original), DTYPE_NAMES[0])
    stored: Any = getattr(model.hf.config, "quantization_config", None)
    rounded = {"quantization_config": stored.to_dict()} if of_config(stored) else {}
    return {**original, **current, **changed, **rounded, spelling: _dtype(model)}


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")
