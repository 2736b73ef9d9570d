"""Low-rank adapters (LoRA, in peft's files), which may act on masks only.

A gated adapter leaves the rows of decided tokens to the base weights: what these compute is bit for
bit what the network computes without the adapter, and only where a mask is fed something is added.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SECTION = "dllm"  # of adapter_config.json: what peft does not know


class Gate:
    """Which rows of a forward an adapter acts on: ``rows`` (B, Q) bool; None: on none of them,
    True: on all."""

    def __init__(self, mask_token_id: int) -> None:
        self.mask_token_id = mask_token_id
        self.rows: torch.Tensor | bool | None = None

    def watch(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Before a forward: find its masks."""
        ids = options.get("input_ids", args[0] if args else None)
        rows = ids == self.mask_token_id
        self.rows = True if rows.all() else rows if rows.any() else None


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
    for module in hf.modules():
        if type(module) is Linear:
            module.__class__ = kind
            module.gate = gate
    hf.base_model.register_forward_pre_hook(gate.watch, with_kwargs=True)
    return gate
