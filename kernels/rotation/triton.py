"""Rotation and scatter as one Triton kernel: a program per token and head."""

import torch
import triton
import triton.language as tl

_empty_like = torch.empty_like
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def turned(a, b, cos, sin, KIND: tl.constexpr):
    """a cos + b sin, each product and the sum rounded to KIND; a, b, cos, sin float32."""
    one, two = (a * cos).to(KIND).to(tl.float32), (b * sin).to(KIND).to(tl.float32)
    return (one + two).to(KIND).to(tl.float32)


@triton.jit
def _rotate_scatter(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, slots_ptr, out_ptr, kept_k_ptr, kept_v_ptr,
    q_head, q_row, k_head, k_row, v_head, v_row, out_head, out_row,
    keys_head, keys_row, values_head, values_row, cos_row, sin_row, heads, half,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    j = tl.arange(0, BLOCK)
    inside = j < half
    cos_at, sin_at = cos_ptr + row * cos_row + j, sin_ptr + row * sin_row + j
    cos_a = tl.load(cos_at, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_at + half, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_at, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_at + half, mask=inside, other=0.0).to(tl.float32)
    if head < heads:
        x = q_ptr + head * q_head + row * q_row + j
        a = tl.load(x, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + half, mask=inside, other=0.0).to(tl.float32)
        out = out_ptr + head * out_head + row * out_row + j
        tl.store(out, turned(a, -b, cos_a, sin_a, KIND), mask=inside)
        tl.store(out + half, turned(b, a, cos_b, sin_b, KIND), mask=inside)
    else:
        slot = tl.load(slots_ptr + row)  # int64: a slot times its stride may exceed 2**31
        own = head - heads
        x = k_ptr + own * k_head + row * k_row + j
        a = tl.load(x, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + half, mask=inside, other=0.0).to(tl.float32)
        out = kept_k_ptr + own * keys_head + slot * keys_row + j
        tl.store(out, turned(a, -b, cos_a, sin_a, KIND), mask=inside)
        tl.store(out + half, turned(b, a, cos_b, sin_b, KIND), mask=inside)
        x = v_ptr + own * v_head + row * v_row + j
        out = kept_v_ptr + own * values_head + slot * values_row + j
        tl.store(out, tl.load(x, mask=inside, other=0.0), mask=inside)
        tl.store(out + half, tl.load(x + half, mask=inside, other=0.0), mask=inside)


def rotate_scatter(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """As `dllm.kernels.rotation.rotate_scatter`."""
    q, k, v, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, cos, sin))
    heads, count, width = q.shape
    out = _empty_like(q, dtype=keys.dtype)  # heads of a token together, as attention wants them
    if count:
        strides = [s for x in (q, k, v, out, keys, values) for s in x.stride()[:2]]
        with torch.cuda.device_of(q):  # Triton launches on the present device
            _rotate_scatter[(count, heads + len(k))](
                q, k, v, cos, sin, slots.contiguous(), out, keys, values, *strides,
                cos.stride(0), sin.stride(0), heads, width // 2,
                KIND=KINDS[torch.promote_types(q.dtype, cos.dtype)],
                BLOCK=max(16, triton.next_power_of_2(width // 2)), num_warps=1,
                enable_fp_fusion=False,  # a product and a sum in one would round once less
            )  # fmt: skip
    return out
