"""The same bits in Triton: functions for other kernels to call on tiles.

Import this module only where Triton is: on a machine without a GPU it runs in Triton's
interpreter, if TRITON_INTERPRET=1 was set before the first import.
"""

import triton
import triton.language as tl

from .naive import BELOW_ONE

_BELOW_ONE = tl.constexpr(BELOW_ONE)
_SMALLEST = tl.constexpr(2.0**-32)


@triton.jit
def log1p(x):
    """ln(1 + x) to a few last bits, also near zero; x finite and above -1."""
    u = 1.0 + x
    moved = u - 1.0
    # what rounding 1 + x did to x is undone by the quotient
    return tl.where(moved == 0.0, x, tl.log(u) * (x / tl.where(moved == 0.0, 1.0, moved)))


@triton.jit
def group_words(keys, row, live, group):
    """Words of the counters ``group`` (R, G) of rows ``row`` (R,): (R, 4 * G) uint32."""
    zero = tl.zeros(group.shape, tl.int64)
    seed = tl.load(keys + row * 4, mask=live, other=0)[:, None] + zero
    stream = (tl.load(keys + row * 4 + 1, mask=live, other=0)[:, None] + zero).to(tl.uint32)
    position = (tl.load(keys + row * 4 + 2, mask=live, other=0)[:, None] + zero).to(tl.uint32)
    step = (tl.load(keys + row * 4 + 3, mask=live, other=0)[:, None] + zero).to(tl.uint32)
    a, b, c, d = tl.philox(seed, group.to(tl.uint32), position, step, stream)
    words = tl.join(tl.join(a, c), tl.join(b, d))  # token id % 4 names the word
    return tl.reshape(words, [group.shape[0], 4 * group.shape[1]])


@triton.jit
def to_uniform(words):
    """32-bit words as float32 in (0, 1)."""
    return tl.minimum((words.to(tl.float32) + 0.5) * _SMALLEST, _BELOW_ONE)


@triton.jit
def to_gumbel(words):
    """32-bit words as float32 Gumbel noise; the uniform number is the upper tail."""
    return -tl.log(-log1p(-to_uniform(words)))
