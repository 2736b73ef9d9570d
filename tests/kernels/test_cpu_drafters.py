"""Block drafters whose layers are one call of the compiled kernels."""

from copy import deepcopy
from typing import Any

import pytest
import torch

import dllm
from dllm.drafting.dflash.checkpoint import BlockCheckpoint
from dllm.drafting.dflash.config import Variant
from dllm.drafting.dflash.drafter import BlockDrafter
from dllm.drafting.dflash.network import BlockNetwork
from dllm.kernels.cpu.layers import Layers

from ..drafting.conftest import make_verifier, prompts
from ..drafting.dflash.conftest import random_drafter, random_weights

pytestmark = pytest.mark.usefixtures("compiled")
CPU = torch.device("cpu")
LENGTHS = 11, 7, 300  # of texts; a text with room for 256 grows


def drafter(**shape: Any) -> BlockCheckpoint:
    return random_drafter(make_verifier("gqa"), layers=3, **shape)


def drafted(network: BlockNetwork, states: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Blocks behind texts, twice: what the first left behind the texts is not read."""
    texts = [network.new_text() for _ in blocks]
    for text, length in zip(texts, LENGTHS, strict=False):
        network.read(text, states[: length - 2])
    network.draft(texts, -blocks)
    for text, length in zip(texts, LENGTHS, strict=False):
        network.read(text, states[length - 2 : length])
    return network.draft(texts, blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 12])
def test_one_call_drafts_what_the_parts_do(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to rounding, each text as if it were alone; one beyond its windows goes part by part."""
    network, calls = BlockNetwork(drafter(sliding_window=window), CPU, dtype), list[int]()
    call = Layers.__call__
    monkeypatch.setattr(
        Layers, "__call__", lambda self, *given: calls.append(self.count) or call(self, *given)
    )
    states, blocks = torch.randn(300, 32, dtype=dtype), torch.randn(3, 4, 32, dtype=dtype)
    together = drafted(network, states, blocks)
    assert calls == [3] * (6 if window is None else 3)  # of the text with 7, once of that with 11
    for n, block in enumerate(blocks):
        with monkeypatch.context() as patch:
            patch.setattr(f"{__name__}.LENGTHS", LENGTHS[n:])
            assert torch.equal(drafted(network, states, block[None])[0], together[n])
    parts = deepcopy(network)
    parts.compiled = None
    bound = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(drafted(parts, states, blocks), together, atol=bound, rtol=bound)


@pytest.mark.parametrize("variant", [Variant(conv_kernel_size=2, conv_group_size=16),
                                     Variant(causal=True)])  # fmt: skip
def test_other_layers_go_part_by_part(variant: Variant) -> None:
    config = drafter().config
    checkpoint = BlockCheckpoint("x", config, random_weights(config, variant), variant=variant)
    assert BlockNetwork(checkpoint, CPU, torch.float32).compiled is None


def test_drafts_do_not_change_a_text() -> None:
    verifier, asked = make_verifier("gqa"), prompts(3)
    how: dict[str, Any] = {"max_new_tokens": 24, "controller": "full"}
    results = dllm.speculate(verifier, BlockDrafter(drafter()), asked, **how)
    plain = dllm.speculate(verifier, None, asked, **how)
    assert [result.tokens for result in results] == [result.tokens for result in plain]
    assert all(result.drafted > 20 for result in results)
