"""What bounds a step of a model: memory, products or launches, by arithmetic."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels.linear import Matrix
from ..models.footprint import WIDTHS, Footprint

BLOCK, KEYS = 32, 512  # positions that a row computes in a step, keys that it reads
KERNELS = 15  # of a layer: 7 products, 2 norms, attention, rotation, SiLU, product, 2 sums
AROUND = 8  # embedding, last norm, angles, statistics


@dataclass(frozen=True)
class Device:
    """Bytes and operations per second, and seconds that it takes to start an operation."""

    bandwidth: float
    speed: float
    launch: float


@dataclass(frozen=True)
class Step:
    """A step of ``rows`` rows: what it moves (bytes), computes (operations) and starts."""

    rows: int
    moved: float
    operations: float
    launches: int

    def seconds(self, device: Device) -> dict[str, float]:
        """What each of them takes; the longest bounds the step."""
        return {
            "launches": self.launches * device.launch,
            "memory": self.moved / device.bandwidth,
            "products": self.operations / device.speed,
        }


def step_of(needs: Footprint, rows: int) -> Step:
    """Weights are read once, keys and values by each row."""
    bytes_each = needs.keys_values / max(1, needs.context)  # a position's keys and values
    numbers = bytes_each / WIDTHS.get(needs.dtype, 2)
    moved = needs.weights * needs.read / needs.parameters + rows * KEYS * bytes_each
    operations = 2 * rows * BLOCK * (needs.active + KEYS * numbers)
    return Step(rows, moved, operations, KERNELS * needs.layers + AROUND)


@torch.inference_mode()
def measure(device: torch.device, dtype: torch.dtype) -> Device:
    """The shortest of a few runs each, in about a second: a copy of 64 MiB, a product of two square
    matrices, and sums of one number."""
    side = 4096 if device.type == "cuda" else 512  # some types have slow products on some CPUs
    source = torch.zeros(2**24, device=device)
    target = torch.zeros_like(source)
    left = torch.ones(side, side, dtype=dtype, device=device)
    product = Matrix(left)
    one = torch.zeros(1, device=device)

    def shortest(function: Callable[[], object], repeats: int) -> float:
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            for _ in range(repeats):
                function()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append((time.perf_counter() - began) / repeats)
        return min(taken)

    return Device(
        2 * source.nbytes / shortest(lambda: target.copy_(source), 3),
        2 * side**3 / shortest(lambda: product(left), 1),
        shortest(lambda: one.add_(1), 100),
    )
