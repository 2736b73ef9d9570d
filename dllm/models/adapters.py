"""Low-rank adapters (LoRA, in peft's files), which may act on masks only.

A gated adapter leaves the rows of decided tokens to the base weights: what these compute is bit for
bit what the network computes without the adapter, and only where a mask is fed something is added.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, ConfigError, missing, one_line
from .quiet import quiet

CONFIG = "adapter_config.json"
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


def attach(hf: Any, folder: str | os.PathLike[str], merge: bool = False) -> dict[str, Any]:
    """Put the adapter of ``folder`` (peft's files, or a hub id of such) on ``hf``, in place, or
    with ``merge`` into its weights.  Returns what `SECTION` says: the facts of a gated one.

    Raises `CheckpointError` when there is no adapter for this network, `ConfigError` when it
    cannot be merged or the package peft is missing.
    """
    section = section_of(folder)
    if section and merge:
        raise ConfigError(
            f"the adapter {str(folder)!r} acts on masks only, which no merged weights can: "
            "leave merge_adapter out"
        )
    try:
        with quiet():
            hf.load_adapter(str(folder))
    except ImportError as error:
        raise missing("peft, which loads adapters,", "train") from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"no adapter for this model can be read from {str(folder)!r}: {one_line(error)}"
        ) from error
    if section:
        gate_adapter(hf, int(section["mask_token_id"]))
    elif merge:
        _merge(hf)
    return section


def section_of(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What `SECTION` in an adapter's folder says; empty where there is none."""
    path = Path(folder) / SECTION
    if not path.is_file():
        return {}
    section: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return section


def _merge(hf: Any) -> None:
    """Add the adapter to the weights and take it off."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(hf.named_modules()):
        if isinstance(module, BaseTunerLayer):
            layer: Any = module
            layer.merge(safe_merge=True)
            parent, _, last = name.rpartition(".")
            setattr(hf.get_submodule(parent), last, layer.base_layer)
    hf._hf_peft_config_loaded = False
