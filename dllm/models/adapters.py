"""Low-rank adapters (LoRA), in peft's files."""

import os
from pathlib import Path
from typing import Any

from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

from ..core.errors import CheckpointError, ConfigError, missing, one_line, short
from .checkpoint import ADAPTER, looks_like_a_path, read_json, snapshot
from .headers import is_finite, read_tensors
from .quiet import quiet

CONFIG, WEIGHTS = ADAPTER, "adapter_model.safetensors"


def attach(hf: Any, adapter: str | os.PathLike[str], merge: bool = False) -> None:
    """Put an adapter (a folder with peft's files, or a hub id) on ``hf``, in place,
    or with ``merge`` into its weights.

    Raises `CheckpointError` when there is no complete adapter for this network, which then stays
    as it was, and `ConfigError` when the package peft is missing or too old.
    """
    if getattr(hf, "_hf_peft_config_loaded", False):
        raise ConfigError("an adapter is on this model already: load the model anew for another")
    folder = _folder(adapter)
    _check_files(folder)
    check_peft()
    try:
        with quiet():
            report = hf.load_adapter(str(folder))
        if report.missing_keys:
            raise ValueError(f"{min(report.missing_keys)} is missing")
    except Exception as error:  # peft and what it stands on raise many types
        _take_off(hf)
        raise CheckpointError(
            f"the adapter in {folder} is not for this network ({one_line(error)}); check "
            "base_model_name_or_path in its adapter_config.json"
        ) from error
    if merge:
        _take_off(hf, merge=True)


def check_peft() -> None:
    """Raise `ConfigError` unless there is a peft that this transformers works with."""
    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError as error:
        raise missing(f"peft {MIN_PEFT_VERSION} or newer, for adapters,", "train") from error


def _folder(adapter: str | os.PathLike[str]) -> Path:
    """Where the files of ``adapter`` are, after fetching them if it is a hub id."""
    if not isinstance(adapter, str | os.PathLike):
        raise ConfigError(f"an adapter is a folder or a hub id, not {short(adapter)}")
    folder = os.path.expanduser(adapter)
    if os.path.isdir(folder):
        return Path(folder)
    if isinstance(adapter, os.PathLike) or looks_like_a_path(adapter):
        raise CheckpointError(f"there is no folder {str(adapter)!r} with an adapter")
    return snapshot(adapter, None, (CONFIG, WEIGHTS))


def _check_files(folder: Path) -> None:
    """Raise `CheckpointError` unless ``folder`` holds a whole adapter, and numbers in it."""
    config = read_json(folder / CONFIG)
    if config is None:
        raise CheckpointError(f"{folder} has no {CONFIG}: an adapter is a folder in peft's format")
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{folder / CONFIG} has the peft_type {short(config.get('peft_type'))}: only low-rank "
            "adapters (LORA) are loaded"
        )
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(
            f"{folder} has no {WEIGHTS}; only safetensors are loaded, because unpickling runs code"
        )
    for name, tensor in read_tensors(folder / WEIGHTS):
        if not is_finite(tensor):
            raise CheckpointError(f"{name} in {folder / WEIGHTS} is not finite; copy it again")


def _take_off(hf: Any, *, merge: bool = False) -> None:
    """Put the layers below the adapter back, with ``merge`` after adding it to their weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(hf.named_modules()):
        if isinstance(module, BaseTunerLayer):
            layer: Any = module
            if merge:
                layer.merge(safe_merge=True)
            parent, _, last = name.rpartition(".")
            setattr(hf.get_submodule(parent), last, layer.base_layer)
    hf._hf_peft_config_loaded = False
