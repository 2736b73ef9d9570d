"""Low-rank adapters (LoRA, in peft's files), which may act on masks only.

A gated adapter leaves the rows of decided tokens to the base weights: what these compute is bit for
bit what the network computes without the adapter, and only where a mask is fed something is added.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..errors import CheckpointError, ConfigError, missing, one_line, short
from .checkpoint import looks_like_a_path, read_json, snapshot
from .fields import check_config
from .quiet import quiet

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SECTION = "dllm.json"  # what peft does not know: a gate, and the facts of a mask
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Gate:
    """Which rows of a forward an adapter acts on: ``rows`` (B, Q) bool; None: on none of them,
    True: on all.  They are the masks among the ids, unless somebody who knows better, as a text
    may hold the mask's id as a word, has ``named`` them (B, Q) for the next forward."""

    def __init__(self, mask_token_id: int) -> None:
        self.mask_token_id = mask_token_id
        self.rows: torch.Tensor | bool | None = None
        self.named: torch.Tensor | None = None

    def watch(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Before a forward: find its masks."""
        ids: Any = options.get("input_ids", args[0] if args else None)
        rows: torch.Tensor = ids == self.mask_token_id if self.named is None else self.named
        self.rows, self.named = True if rows.all() else rows if rows.any() else None, None


def _gated_class() -> type[nn.Module]:
    from peft.tuners.lora.layer import Linear

    class GatedLinear(Linear):
        """A linear layer of peft whose low-rank part acts on the rows of its gate."""

        gate: Gate

        def forward(self, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            rows = self.gate.rows
            if rows is True:
                result: torch.Tensor = super().forward(x, *args, **options)
                return result
            out: torch.Tensor = self.base_layer(x)
            if rows is not None and self.active_adapters:
                out[rows] = super().forward(x[rows])
            return out

    return GatedLinear


def gate_adapter(hf: Any, mask_token_id: int) -> Gate:
    """Let the adapter layers of ``hf`` act on masks only; changes it in place."""
    from peft.tuners.lora.layer import Linear

    gate, kind = Gate(mask_token_id), _gated_class()
    layers: list[Any] = list(hf.modules())
    for layer in [layer for layer in layers if type(layer) is Linear]:
        gated: Any = layer
        gated.__class__, gated.gate = kind, gate
    hf.base_model.register_forward_pre_hook(gate.watch, with_kwargs=True)
    hf.adapter_gate = gate
    return gate


def attach(hf: Any, adapter: str | os.PathLike[str], merge: bool = False) -> dict[str, Any]:
    """Put an adapter (a folder with peft's files, or a hub id) on ``hf``, in place, or with
    ``merge`` into its weights.  Returns what `SECTION` says: the facts of a gated one.

    Raises `CheckpointError` when there is no complete adapter for this network, which then stays
    as it was, and `ConfigError` when it cannot be merged or the package peft is missing.
    """
    folder = _folder(adapter)
    section = read_json(folder / SECTION) or {}
    check_config({"dllm": section})
    rows, mask = hf.get_input_embeddings().weight.shape[0], section.get("mask_token_id")
    if section and not (section.get("family") and mask is not None and 0 <= mask < rows):
        raise CheckpointError(
            f"{folder / SECTION} needs a family and a mask_token_id below {rows}, not {short(mask)}"
        )
    if section and merge:
        raise ConfigError(
            f"the adapter {str(adapter)!r} acts on masks only, which no merged weights can: "
            "leave merge_adapter out"
        )
    _check_files(folder)
    try:
        with quiet():
            report = hf.load_adapter(str(folder))
        if report.missing_keys:
            raise ValueError(f"{min(report.missing_keys)} is missing")
    except ImportError as error:
        raise missing("peft, which loads adapters,", "train") from error
    except Exception as error:  # peft and what it stands on raise many types
        _take_off(hf)
        raise CheckpointError(
            f"the adapter in {folder} is not for this network ({one_line(error)}); check "
            "base_model_name_or_path in its adapter_config.json"
        ) from error
    if section:
        gate_adapter(hf, int(section["mask_token_id"]))
    elif merge:
        _take_off(hf, merge=True)
    return section


def _folder(adapter: str | os.PathLike[str]) -> Path:
    """Where the files of ``adapter`` are, after fetching them if it is a hub id."""
    if not isinstance(adapter, str | os.PathLike):
        raise ConfigError(f"an adapter is a folder or a hub id, not {short(adapter)}")
    folder = Path(adapter).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(adapter, os.PathLike) or looks_like_a_path(adapter):
        raise CheckpointError(f"there is no folder {str(adapter)!r} with an adapter")
    return snapshot(adapter, None, (CONFIG, WEIGHTS, SECTION))


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
    try:
        with safe_open(folder / WEIGHTS, "pt") as tensors:
            broken = [n for n in tensors.keys() if not tensors.get_tensor(n).isfinite().all()]  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder / WEIGHTS} is truncated or corrupt ({one_line(error)}); copy it again"
        ) from error
    if broken:
        raise CheckpointError(f"{broken[0]} in {folder / WEIGHTS} is not finite; copy it again")


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
