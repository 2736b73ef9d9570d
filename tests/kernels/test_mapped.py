"""Weights that are mapped from a file leave the memory once there is a copy, and keep their
numbers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm.kernels.linear import Packed, available
from dllm.kernels.mapped import MAPS, release

pytestmark = pytest.mark.skipif(not MAPS.exists(), reason="Linux tells what is mapped")


def resident(tensor: torch.Tensor) -> int:
    """Kilobytes in memory of the mapping that ``tensor`` lies in."""
    inside, size = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            low, high = (int(end, 16) for end in name.split("-"))
            inside = low <= tensor.data_ptr() < high
        elif inside and name == "Rss:":
            size = int(rest[0])
    return size


@pytest.fixture
def weight(tmp_path: Path) -> torch.Tensor:
    """(1024, 1024) float32, 4 MB, mapped."""
    torch.manual_seed(0)
    save_file({"weight": torch.randn(1024, 1024)}, tmp_path / "model.safetensors")
    return load_file(tmp_path / "model.safetensors")["weight"]


def test_what_was_read_goes_and_what_was_written_stays(weight: torch.Tensor) -> None:
    expected = weight.clone()
    weight[500] = expected[500] = 7.0
    before = resident(weight)
    assert release(weight) and resident(weight) < before - 3000
    assert torch.equal(weight, expected)


def test_other_memory_is_left_alone() -> None:
    assert not release(torch.zeros(1024, 1024))


@pytest.mark.skipif(not available(), reason="no AVX-512, or no oneDNN")
def test_a_packed_weight_is_held_once(weight: torch.Tensor) -> None:
    expected = weight.clone()
    with torch.inference_mode():
        packed = Packed()
        parts = packed.parts(weight)
    assert parts is not None and resident(weight) < 500
    assert torch.equal(weight, expected)
    packed.check(weight)
    with torch.inference_mode():
        assert packed.parts(weight) is parts
