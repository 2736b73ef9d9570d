"""Packed rows through a variable-length kernel; a plain one stands in for FlashAttention's."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dllm.models import DiffusionModel, Segment, attention
from dllm.models.attention import attend
from dllm.models.varlen import Borders, Spans, Varlen, in_pytorch

calls: list[int] = []


def kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None, causal: bool,
) -> torch.Tensor:  # fmt: skip
    """What flash_attn_varlen_func documents, on any device."""
    assert not causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    calls.append(len(cu_seqlens_q) - 1)
    out, groups = torch.full_like(q, torch.nan), q.shape[1] // k.shape[1]
    for row in range(len(cu_seqlens_q) - 1):
        (a, b), (c, d) = cu_seqlens_q[row : row + 2].tolist(), cu_seqlens_k[row : row + 2].tolist()
        assert b - a <= max_seqlen_q and d - c <= max_seqlen_k
        own = (x[c:d].transpose(0, 1).repeat_interleave(groups, 0) for x in (k, v))
        result = F.scaled_dot_product_attention(q[a:b].transpose(0, 1), *own, scale=softmax_scale)
        out[a:b] = result.transpose(0, 1)
    return out


def offset_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, seqused_k: torch.Tensor | None = None,
    **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """The same with used lengths beside offsets, as FlashAttention 3 documents them."""
    if seqused_k is None:
        return kernel(q, k, v, **rest)
    starts, used = rest.pop("cu_seqlens_k")[:-1].tolist(), seqused_k.tolist()
    at = [i for start, n in zip(starts, used, strict=True) for i in range(start, start + n)]
    borders = torch.tensor([0, *np.cumsum(used)], dtype=torch.int32)
    return kernel(q, k[at], v[at], cu_seqlens_k=borders, **rest)


CASES = {
    "ragged": [
        Segment(slice(0, 3), slice(5, 20)), Segment(slice(3, 5), torch.tensor([0, 7, 31])),
        Segment(slice(5, 9), slice(2, 12), rows=2, key_stride=20),
    ],
    "gaps": [
        Segment(slice(0, 2), slice(12, 20)), Segment(slice(2, 6), slice(0, 7)),
        Segment(slice(6, 8), slice(0, 9)), Segment(slice(8, 9), slice(31, 38)),
    ],
    "end to end": [Segment(slice(0, 4), slice(0, 30)), Segment(slice(4, 9), slice(30, 40))],
}  # fmt: skip


@pytest.mark.parametrize("function", [kernel, offset_kernel, in_pytorch])
@pytest.mark.parametrize("name", CASES)
def test_one_call_equals_one_per_segment(
    dream: DiffusionModel, name: str, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.randn(1, 4, 9, 16, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 2, 40, 16, dtype=torch.bfloat16)
    module: Any = dream.hf.model.layers[0].self_attn
    wanted, _ = attend(module, q, k, v, None, base="sdpa", scaling=0.3, segments=CASES[name])
    calls.clear()
    monkeypatch.setitem(attention.VARLEN, "flash_attention_2", Varlen("flash_attn", function))
    got, _ = attend(
        module, q, k, v, None, base="flash_attention_2", scaling=0.3, segments=CASES[name]
    )
    if function is not in_pytorch:
        assert calls == [sum(segment.rows for segment in CASES[name])]
    torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-2)


def borders_of(name: str, slots: int, function: Any) -> Borders:
    found = Varlen("flash_attn", function).borders(CASES[name], slots, torch.device("cpu"))
    assert found is not None
    return found


def test_keys_that_lie_end_to_end_are_not_copied() -> None:
    whole, part = borders_of("end to end", 40, kernel), borders_of("ragged", 50, kernel)
    assert whole.index is None
    assert part.index is not None and len(part.index) == 15 + 3 + 20
    assert part.queries.tolist() == [0, 3, 5, 7, 9] and part.keys.tolist() == [0, 15, 18, 28, 38]
    assert borders_of("gaps", 50, kernel).index is not None


def test_ranges_stay_where_they_are_when_the_kernel_takes_offsets() -> None:
    borders = borders_of("gaps", 50, in_pytorch)
    assert borders.index is None and borders.used is not None
    assert borders.keys.tolist() == [12, 0, 0, 31, 50] and borders.used.tolist() == [8, 7, 9, 7]
    assert borders.queries.tolist() == [0, 2, 6, 8, 9]
    gathered = borders_of("ragged", 50, in_pytorch)
    assert gathered.used is not None and gathered.index is not None


def test_gaps_and_masks_are_left_to_single_calls() -> None:
    cpu = torch.device("cpu")
    assert Spans.of([Segment(slice(1, 3), slice(0, 3))], 9, cpu) is None
    masked = Segment(slice(0, 3), slice(0, 3), mask=torch.zeros(3, 3))
    assert Spans.of([masked], 9, cpu) is None
    varlen = Varlen("flash_attn", kernel)
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    assert varlen(q, k, k, [Segment(slice(0, 3), slice(0, 3))], None) is None


def test_each_device_has_borders_of_its_own() -> None:
    varlen, segments = Varlen("flash_attn", in_pytorch), CASES["ragged"]
    for name in ("cpu", "meta", "cpu"):
        found = varlen.borders(segments, 50, torch.device(name))
        assert found is not None and found.index is not None
        assert {x.device.type for x in (found.queries, found.keys, found.index)} == {name}


def test_what_a_kernel_takes() -> None:
    half = torch.empty(1, 2, 3, 16, dtype=torch.bfloat16)
    named, own = Varlen("flash_attn", kernel), Varlen()
    assert named.suits(half, 16) and not named.suits(half, 24) and not named.suits(half.float(), 16)
    assert not own.suits(half, 16)  # not on a CPU
