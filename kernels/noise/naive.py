"""Philox4x32-10 in NumPy, one call per set of counters: the oracle of keyed noise.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
"""

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]
UInt32Array = npt.NDArray[np.uint32]
FloatArray = npt.NDArray[np.float32]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK = 0xFFFFFFFF
# the largest float32 below one: bits near 2**32 would round up to it, and -log1p(-1) is infinite
BELOW_ONE = float(np.float32(1) - np.float32(2**-24))


def philox(counter: UInt64Array, key: UInt64Array) -> UInt64Array:
    """Four random words per counter.

    ``counter`` (..., 4) and ``key`` (..., 2) uint64 hold 32-bit words; the leading shapes must
    broadcast.  Returns (..., 4) uint64 holding 32-bit words.
    """
    mask, half = np.uint64(MASK), np.uint64(32)
    c0, c1, c2, c3 = (counter[..., i] for i in range(4))
    k0, k1 = key[..., 0], key[..., 1]
    for _ in range(ROUNDS):
        p0 = c0 * np.uint64(MULTIPLIERS[0])
        p1 = c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & mask, (p0 >> half) ^ c3 ^ k1, p0 & mask
        k0 = (k0 + np.uint64(WEYL[0])) & mask
        k1 = (k1 + np.uint64(WEYL[1])) & mask
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1)


def bits(
    seed: npt.ArrayLike, stream: npt.ArrayLike, position: npt.ArrayLike, step: npt.ArrayLike,
    tokens: npt.ArrayLike,
) -> UInt32Array:  # fmt: skip
    """32 random bits per element of the broadcast arguments, uint32.

    ``seed`` counts modulo 2**64 (negative values wrap), the others modulo 2**32.  The counter is
    (token // 4, position, step, stream), the key the two halves of the seed, and token % 4 names
    the word of the result: a pure function of the five numbers, whatever is asked beside them.
    """
    mask = np.uint64(MASK)
    word = np.atleast_1d(_unsigned(seed))
    token, where, when, which = (_unsigned(a) & mask for a in (tokens, position, step, stream))
    token, where, when, which, word = np.broadcast_arrays(token, where, when, which, word)
    counter = np.stack([token >> np.uint64(2), where, when, which], axis=-1)
    key = np.stack([word & mask, word >> np.uint64(32)], axis=-1)
    lane = (token & np.uint64(3)).astype(np.int64)[..., None]
    drawn = np.take_along_axis(philox(counter, key), lane, axis=-1)[..., 0]
    shape = np.broadcast_shapes(*(np.shape(a) for a in (seed, stream, position, step, tokens)))
    return drawn.astype(np.uint32).reshape(shape)


def uniform(*name: npt.ArrayLike) -> FloatArray:
    """Uniform numbers in (0, 1), float32: (bits + 0.5) / 2**32; arguments as for `bits`."""
    return to_uniform(bits(*name))


def gumbel(*name: npt.ArrayLike) -> FloatArray:
    """Standard Gumbel noise, float32, always finite; arguments as for `bits`."""
    # The uniform number w is read as the upper tail, u = 1 - w, so that large noise comes from
    # small w, where float32 is fine-grained.  With u itself the tail that decides rare tokens
    # would end at u = 1 - 2**-24 in coarse steps, or at +inf once u rounds to one.
    return -np.log(-np.log1p(-uniform(*name)))


def to_uniform(words: UInt32Array) -> FloatArray:
    """32-bit words as float32 in (0, 1)."""
    w = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    below_one: FloatArray = np.minimum(w, np.float32(BELOW_ONE))
    return below_one


def _unsigned(value: npt.ArrayLike) -> UInt64Array:
    """Integers modulo 2**64; a Python int may exceed the range of int64."""
    if isinstance(value, int):
        return np.asarray(value & (2**64 - 1), np.uint64)
    array = np.asarray(value)
    return array if array.dtype == np.uint64 else array.astype(np.int64).view(np.uint64)
