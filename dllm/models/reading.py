"""What a checkpoint is, from its small files: its family, and the network it describes."""

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedConfig

from ..core.errors import CheckpointError, ConfigError, DllmError, one_line
from .checkpoint import Checkpoint
from .family import Family, families, family_for, get_family
from .fields import own_section
from .quiet import quiet


def family_of(
    checkpoint: Checkpoint, named: str | None = None, given: Mapping[str, Any] = {}
) -> Family:
    """The family of ``checkpoint``: ``named``, that of its ``dllm`` section, or architecture.

    Raises `CheckpointError` when there is none, and `ConfigError` when several could be meant.
    """
    config = checkpoint.config
    named = named or own_section(config).get("family")
    if named:
        return get_family(named)
    result = family_for(config)
    if result is None:
        architecture = (config.get("architectures") or ["(none)"])[0]
        remote = "auto_map" in config
        known = {name for f in families().values() if f.diffusion for name in f.architectures}
        raise CheckpointError(
            f"architecture {architecture!r} of {checkpoint.name!r} "
            f"{'needs remote code, which is never run' if remote else 'is not supported'}; "
            f"supported are {', '.join(sorted(known))} and every causal language model of "
            "transformers.  If it is one of these networks under another name, try family=... with "
            "mask_token_id=...; else write a dllm.models.Family: the class of transformers that "
            "computes it, how config.json and the names of its weights translate, whether logits "
            "are shifted, and how it attends (docs/extend.md)"
        )
    mask_id = given.get("mask_token_id", config.get("mask_token_id"))
    masked = mask_id is not None or config.get("is_causal") is False
    if masked and not result.diffusion:
        raise ambiguous_family(config["architectures"][0])
    return result


ORDERS = {"block_causal": ", in blocks", "decided_first": ", decided tokens first",
          "causal_prefix": ", behind a causal prefix"}  # fmt: skip


def ambiguous_family(kind: str) -> ConfigError:
    """The error for plain weights of a class of transformers that follow no known family."""
    names = {
        f"family={family.name!r} ({'shifted by one' if family.logit_shift else 'in place'}"
        f"{ORDERS.get(family.mask_kind, '')})"
        for family in families().values()
        if family.diffusion and family.model_class is not None
        and family.model_class.__name__ == kind
    }  # fmt: skip
    known = ", ".join(sorted(names)) or "none reads this network yet, see dllm.models.Family"
    return ConfigError(
        f"a {kind} with a mask token or without a causal mask may predict in place or shifted by "
        f"one; say which family it follows: {known}, or 'autoregressive', which is no "
        "diffusion model"
    )


def native_config(checkpoint: Checkpoint, family: Family) -> tuple[PreTrainedConfig, bool]:
    """The transformers config, and whether the files are in the official layout.

    Raises `CheckpointError` when ``config.json`` describes no network of the family.
    """
    raw = checkpoint.config
    known = None if family.model_class is None else family.model_class.config_class
    native = known is not None and raw.get("model_type") == known.model_type
    named = (raw.get("architectures") or [""])[0] in family.architectures
    official = named or not native  # weights under another name are tried as official ones
    try:
        with quiet():
            config = _translate(checkpoint, family, official)
    except DllmError:
        raise
    except Exception as error:  # validation errors of the config classes, of many types
        raise CheckpointError(
            f"config.json of {checkpoint.name!r} is invalid: {one_line(error)}"
        ) from error
    return config, official and family.to_native is not None


def _translate(checkpoint: Checkpoint, family: Family, official: bool) -> PreTrainedConfig:
    raw = checkpoint.config
    if family.model_class is None or family.to_native is None:
        if raw.get("model_type") not in transformers.CONFIG_MAPPING:
            reader, what = family_for(raw), "name the family that it follows"
            if reader is not None and reader is not family:
                what = f"leave family= out: {reader.name!r} reads it"
            raise CheckpointError(
                f"family {family.name!r} reads the classes of transformers, which knows no "
                f"model_type {raw.get('model_type')!r} as in {checkpoint.name!r}; {what}"
            )
        auto: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
            checkpoint.folder, local_files_only=True, trust_remote_code=False
        )
        return auto
    if official:
        try:
            translated = family.to_native(raw)
        except CheckpointError as error:
            if (raw.get("architectures") or [""])[0] in family.architectures:
                raise
            raise CheckpointError(
                f"{checkpoint.name!r} is no {family.name} checkpoint: that family reads "
                f"{', '.join(family.architectures)} or a native {family.model_class.__name__} "
                f"({error})"
            ) from error
        translated.dtype = raw.get("torch_dtype") or raw.get("dtype")
        if raw.get("quantization_config"):
            translated.quantization_config = raw["quantization_config"]
        return translated
    return family.model_class.config_class.from_dict(dict(raw))  # type: ignore[union-attr]
