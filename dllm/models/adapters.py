"""Low-rank adapters (LoRA), in peft's files."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

from ..core.errors import CheckpointError, ConfigError, missing, one_line, short
from .checkpoint import ADAPTER, looks_like_a_path, read_json, snapshot
from .family import Family
from .headers import is_finite, read_tensors
from .quiet import quiet

CONFIG, WEIGHTS = ADAPTER, "adapter_model.safetensors"
REFUSED = (  # what is more than numbers added to weights
    "alora_invocation_tokens", "ensure_weight_tying", "layer_replication",
)  # fmt: skip


def attach(hf: Any, family: Family, adapter: str | os.PathLike[str], merge: bool = False) -> None:
    """Put an adapter (a folder with peft's files, or a hub id) on ``hf``, in place,
    or with ``merge`` into its weights.  It may have been trained on the official network.

    Raises `CheckpointError` when there is no complete adapter for this network, which then stays as
    it was unless merging had begun, and `ConfigError` when the package peft is missing or too old.
    """
    if getattr(hf, "_hf_peft_config_loaded", False):
        raise ConfigError("an adapter is on this model already: load the model anew for another")
    folder = _folder(adapter)
    weights = _read(folder)
    check_peft()
    try:
        from peft import PeftConfig

        with quiet():
            config: Any = PeftConfig.from_pretrained(str(folder))
            native = {family.native_key(key): weight for key, weight in weights.items()}
            if native.keys() != weights.keys():  # else the file's own names may be patterns
                config.target_modules = {key.partition(".lora_")[0] for key in native}
                if config.alpha_pattern:
                    raise ValueError("its alpha_pattern has names of the official network")
            report = hf.load_adapter(peft_config=config, adapter_state_dict=native)
        for key in sorted(report.missing_keys & {*dict(hf.named_parameters())}):  # tied: one
            raise ValueError(f"{key} is missing")
        for key in sorted(report.unexpected_keys):
            raise ValueError(f"{key} has no place in it")
        if merge:
            _remove(hf, merge=True)
    except Exception as error:  # peft and what it stands on raise many types
        _remove(hf)
        raise CheckpointError(
            f"the adapter in {folder} is not for this network ({one_line(error)}); it fits "
            "base_model_name_or_path in its adapter_config.json, where that is not quantised"
        ) from error


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


def _read(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in ``folder``; `CheckpointError` unless it holds a whole, finite adapter."""
    config = read_json(folder / CONFIG)
    if config is None:
        raise CheckpointError(f"{folder} has no {CONFIG}: an adapter is a folder in peft's format")
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{folder / CONFIG} has the peft_type {short(config.get('peft_type'))}: only low-rank "
            "adapters (LORA) are loaded"
        )
    for name in (name for name in REFUSED if config.get(name)):
        raise CheckpointError(
            f"{folder / CONFIG} sets {name}, which is not supported: train the adapter without it"
        )
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(
            f"{folder} has no {WEIGHTS}; only safetensors are loaded, because unpickling runs code"
        )
    weights = {}
    for name, tensor in read_tensors(folder / WEIGHTS):
        if not is_finite(tensor):
            raise CheckpointError(f"{name} in {folder / WEIGHTS} is not finite; copy it again")
        # transformers does not know that peft leaves the end of this name out
        name += ".weight" * name.endswith("lora_magnitude_vector")
        weights[name.removeprefix("base_model.model.")] = tensor
    return weights


def _remove(hf: Any, *, merge: bool = False) -> None:
    """Put the layers below the adapter back, with ``merge`` after adding it to their weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, module in reversed([*hf.named_modules()]):
        layer: Any = module
        if name.endswith(".token_adapter"):  # the wrapper around it puts it into the weights
            continue
        if isinstance(module, AuxiliaryTrainingWrapper):
            below = (
                layer.unload_and_optionally_merge_module(True, True, None) if merge
                else layer.original_module
            )  # fmt: skip
        elif isinstance(module, BaseTunerLayer):
            if merge:
                layer.merge(safe_merge=True)
            below = layer.base_layer
        else:
            continue
        parent, _, last = name.rpartition(".")
        setattr(hf.get_submodule(parent), last, below)
    hf._hf_peft_config_loaded = False
    hf.__dict__.pop("peft_config", None)
