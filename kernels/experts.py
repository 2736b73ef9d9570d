"""The experts of a mixture on a CPU: each row times the matrices that were chosen for it.

A row's bits depend neither on the other rows nor on who shares its experts.  With compiled kernels
all experts of a layer are one call (`Groups`); without them each is a product of its own.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from .cpu.layers import Groups
from .linear import FILLED, SIZES, Packed, product


def mixed(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate: Any, first: Any, second: Any
) -> torch.Tensor:
    """(n, d): for each row of ``x`` (n, d) the sum over its ``chosen`` (n, k) experts, times their
    ``weights`` (n, k).  An expert is ``second(gate(g) * u)`` where ``first(x)`` is g and u; both
    are called as `Groups`."""
    of = chosen.flatten()
    gated, up = first(x, of, chosen.shape[1]).chunk(2, -1)
    done: torch.Tensor = second(gate(gated) * up, of, 1) * weights.reshape(-1, 1)
    return done.view(*chosen.shape, done.shape[-1]).sum(1).to(x.dtype)


def apart(x: torch.Tensor, of: torch.Tensor, each: int, times: Any) -> torch.Tensor:
    """As `Groups`: ``times(i, rows)`` multiplies rows by the weight i."""
    order, first, done = of.argsort(), 0, []
    rows = nn.functional.pad(x[order // each], (0, 0, 0, SIZES[-1] - SIZES[-2]))
    for i, count in enumerate(of.bincount(minlength=1).tolist()):
        if count or not len(of):
            size = FILLED[count] if count < len(FILLED) else count  # rows of the next fill it up
            done.append(times(i, rows[first : first + size])[:count])
            first += count
    return torch.cat(done)[order.argsort()]


def forward(
    module: Any, first: Packed, second: Packed, x: torch.Tensor, chosen: torch.Tensor,
    weights: torch.Tensor,
) -> Any:  # fmt: skip
    """As that of ``module``, one of transformers' with weights (experts, outputs, inputs)."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return type(module).forward(module, x, chosen, weights)
    up, down = module.gate_up_proj, module.down_proj
    products = partial(_product, up, first), partial(_product, down, second)
    return mixed(x, chosen, weights, module.act_fn, *products)


def _product(
    weight: nn.Parameter, packed: Packed, x: torch.Tensor, of: torch.Tensor, each: int
) -> torch.Tensor:
    other = x.dtype != weight.dtype or torch.is_autocast_enabled("cpu")
    parts = None if other else packed.parts(weight)
    if parts is None:
        plain = weight.unbind()  # one gradient for all
        return apart(x, of, each, lambda i, rows: nn.functional.linear(rows, plain[i]))
    if isinstance(parts[0], Groups):
        return parts[0](x, of, each)
    return apart(x, of, each, lambda i, rows: product(rows, parts[i], None))
