"""Keyed noise: known answers, one set of bits everywhere, the right distributions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm.kernels import noise
from dllm.kernels.noise import naive
from dllm.kernels.noise import torch as fast

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip

WORD = st.integers(0, 2**32 - 1)
SEED = st.integers(0, 2**64 - 1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def words(text: str) -> list[int]:
    return [int(w, 16) for w in text.split()]


@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_known_answers(counter: str, key: str, result: str) -> None:
    got = naive.philox(np.array(words(counter), np.uint64), np.array(words(key), np.uint64))
    assert got.tolist() == words(result)


@pytest.mark.parametrize("counter, key, result", KNOWN[1:])
def test_words_of_the_counter_are_token_position_step_stream(
    counter: str, key: str, result: str
) -> None:
    group, position, step, stream = words(counter)
    low, high = words(key)
    seed = low | high << 32
    tokens = np.arange(4, dtype=np.uint64) + np.uint64(4 * (group % 2**30))
    expected = naive.philox(
        np.array([group % 2**30, position, step, stream], np.uint64),
        np.array([low, high], np.uint64),
    )
    assert noise.bits(seed, stream, position, step, tokens).tolist() == expected.tolist()
    keys = noise.pack_keys([(seed, stream, position, step)])
    first = int(tokens[0])
    assert fast.bits(keys, first, first + 4)[0].tolist() == expected.tolist()


def test_zero_key_gives_the_published_words() -> None:
    assert noise.bits(0, 0, 0, 0, np.arange(4)).tolist() == words(KNOWN[0][2])
    assert fast.bits(noise.pack_keys([(0, 0, 0, 0)]), 0, 4)[0].tolist() == words(KNOWN[0][2])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_kernels_draw_the_same(threads: int) -> None:
    """Ranges that begin and end anywhere, and any ids; seeds and keys of all 64 and 32 bits."""
    rng, before = np.random.default_rng(0), torch.get_num_threads()
    keys = torch.from_numpy(rng.integers(0, 2**32, (5, 4)))
    keys[:, 0] = torch.tensor([-(2**63), 2**63 - 1, -1, 0, 3 * 2**40])
    torch.set_num_threads(threads)
    try:
        for low, n in [(0, 1), (3, 1), (5, 0), (1, 126), (127, 130), (4, 256), (7, 50_001)]:
            expected = fast.to_gumbel(fast.bits(keys, low, low + n))
            assert torch.equal(noise.row_gumbel(keys, low, low + n), expected)
            assert torch.equal(noise.row_gumbel(keys.T.contiguous().T, low, low + n), expected)
        every = fast.bits(keys, 0, 1000)
        for n in (0, 1, 31, 33, 200):
            tokens = torch.from_numpy(rng.integers(0, 1000, (n, 5))).T  # not in one piece
            expected = fast.to_gumbel(every.gather(1, tokens))
            assert torch.equal(noise.row_gumbel_at(keys, tokens), expected)
        top = noise.pack_keys([(1, 0, 26, 0)])  # the word of id 138 is 0xffffff9d, no float below 1
        drawn = noise.row_gumbel_at(top, torch.tensor([[138]])), noise.row_gumbel(top, 138, 139)
        assert fast.bits(top, 138, 139).item() == 0xFFFFFF9D and all(map(torch.isfinite, drawn))
    finally:
        torch.set_num_threads(before)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(SEED, WORD, WORD, WORD), min_size=1, max_size=5),
    low=st.integers(0, 200_000),
    size=st.integers(1, 50),
)
def test_tensor_bits_equal_numpy_bits(
    rows: list[tuple[int, int, int, int]], low: int, size: int
) -> None:
    tokens = np.arange(low, low + size)
    expected = np.stack([noise.bits(*row, tokens) for row in rows])
    keys = noise.pack_keys(rows)
    assert np.array_equal(fast.bits(keys, low, low + size).numpy(), expected)
    uniform = naive.to_uniform(expected)
    drawn = fast.to_uniform(fast.bits(keys, low, low + size))
    assert np.array_equal(drawn.numpy(), uniform)
    gumbel = np.stack([noise.gumbel(*row, tokens) for row in rows])
    np.testing.assert_allclose(
        noise.row_gumbel(keys, low, low + size).numpy(), gumbel, rtol=1e-5, atol=1e-6
    )


def test_every_part_of_the_name_matters() -> None:
    base = noise.bits(7, 1, 2, 3, np.arange(64))
    for name in [(8, 1, 2, 3), (7 + 2**32, 1, 2, 3), (7, 2, 2, 3), (7, 1, 3, 3), (7, 1, 2, 4)]:
        assert not (noise.bits(*name, np.arange(64)) == base).any()
    assert len(set(base.tolist())) == 64


def test_tiling_and_batch_do_not_change_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = noise.pack_keys([(9, r, 5 * r, 2) for r in range(7)])
    whole = noise.row_gumbel(keys, 0, 1003)
    parts = [noise.row_gumbel(keys, a, b) for a, b in [(0, 1), (1, 6), (6, 517), (517, 1003)]]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(noise.row_gumbel(keys[[4, 1]], 0, 1003), whole[[4, 1]])
    monkeypatch.setattr(fast, "GROUPS", 13)
    assert torch.equal(noise.row_gumbel(keys, 0, 1003), whole)


def test_numpy_arguments_broadcast() -> None:
    positions = np.arange(6)
    together = noise.uniform(3, 4, positions, 1, 0)
    assert together.shape == (6,) and together.dtype == np.float32
    assert [float(noise.uniform(3, 4, p, 1, 0)) for p in range(6)] == together.tolist()
    table = noise.bits(np.array([[1], [2]]), 0, positions, 0, 0)
    assert table.shape == (2, 6)
    assert np.array_equal(table[1], noise.bits(2, 0, positions, 0, 0))
    assert noise.bits(-1, 0, 0, 0, 0) == noise.bits(2**64 - 1, 0, 0, 0, 0)


@pytest.mark.parametrize("word", [0, 1, 2**24, 2**31, 2**32 - 1])
def test_extreme_words_stay_inside_the_interval(word: int) -> None:
    w = naive.to_uniform(np.array([word], np.uint32))
    assert 0 < w[0] < 1
    tensor = torch.tensor([word])
    assert fast.to_uniform(tensor).item() == w[0]
    assert math.isfinite(fast.to_gumbel(tensor).item())


def test_the_upper_tail_is_fine_grained() -> None:
    largest = fast.to_gumbel(torch.tensor([0, 1, 2, 3])).double()
    exact = -torch.log(-torch.log1p(-(torch.arange(4).double() + 0.5) / 2**32))
    torch.testing.assert_close(largest, exact, rtol=1e-6, atol=0)
    assert largest[0] > 22.8  # ln(2**33); with u = 1 - 2**-24 as the end it would be 16.6


def test_uniform_moments_and_independence() -> None:
    n = 200_000
    keys = noise.pack_keys([(11, 0, 0, 0), (11, 0, 1, 0)])
    u = fast.to_uniform(noise.row_bits(keys, 0, n)).double()
    bound = 5 / math.sqrt(n)
    assert ((u.mean(1) - 0.5).abs() < bound * math.sqrt(1 / 12)).all()
    assert ((u.var(1) - 1 / 12).abs() < bound * math.sqrt(1 / 180)).all()
    for a, b in [(u[0], u[1]), (u[0, :-1], u[0, 1:]), (u[0, :-4], u[0, 4:])]:
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < bound
    grid = torch.arange(1, n + 1).double() / n
    assert (u[0].sort().values - grid).abs().max() < 1.95 / math.sqrt(n)  # Kolmogorov, 0.1 %


def test_gumbel_distribution() -> None:
    n = 200_000
    g = noise.row_gumbel(noise.pack_keys([(12, 3, 4, 5)]), 0, n).double()[0]
    assert abs(g.mean().item() - 0.5772157) < 5 * math.pi / math.sqrt(6 * n)
    distribution = torch.exp(-torch.exp(-g.sort().values))
    assert (distribution - torch.arange(1, n + 1).double() / n).abs().max() < 1.95 / math.sqrt(n)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.tuples(SEED, WORD, WORD, WORD), min_size=1, max_size=3),
    low=st.integers(0, 200_000),
    size=st.integers(0, 50) | st.sampled_from([1024, 1025, 2050]),
)
def test_triton_bits_equal_numpy_bits(
    rows: list[tuple[int, int, int, int]], low: int, size: int
) -> None:
    pytest.importorskip("triton")
    from .triton_noise import bits

    tokens = np.arange(low, low + size)
    expected = np.stack([noise.bits(*row, tokens) for row in rows])
    keys = noise.pack_keys(rows, DEVICE)
    assert np.array_equal(bits(keys, low, low + size).cpu().numpy(), expected)
