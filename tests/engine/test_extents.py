"""The pool of slots: what is handed out never overlaps, and what comes back is whole again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm.core.errors import ConfigError
from dllm.engine.extents import Extents
from dllm.engine.kv import KVBuffer


@settings(deadline=None)  # time says nothing here
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 50)), max_size=80))
def test_a_pool_is_a_table_of_owners(moves: list[tuple[bool, int, int]]) -> None:
    """Against a list that says who owns each slot: first fit, no overlap, nothing lost."""
    pool, owner, held, name = Extents(40), [0] * 40, [], 0
    for take, n, which in moves:
        if take:
            starts = [i for i in range(40 - n + 1) if not any(owner[i : i + n])]
            base = pool.allocate(n)
            assert base == (starts[0] if starts else None)
            if base is not None:
                name += 1
                owner[base : base + n] = [name] * n
                held.append((base, n))
        elif held:
            base, n = held.pop(which % len(held))
            pool.free(base, n)
            owner[base : base + n] = [0] * n
        assert pool.used == sum(map(bool, owner))
    for base, n in held:
        pool.free(base, n)
    assert pool.used == 0 and pool.allocate(40) == 0 and not pool._free


@pytest.mark.parametrize("base", [0, 2, 3, 7, 9])
def test_what_is_not_taken_is_not_given_back(base: int) -> None:
    pool = Extents(10)
    assert pool.allocate(4) == 0
    pool.free(0, 2)
    with pytest.raises(ConfigError, match="not taken"):
        pool.free(base, 3)
    assert pool.used == 2


@torch.inference_mode()
def test_a_buffer_grows_by_copying_up_to_its_budget() -> None:
    buffer = KVBuffer(layers=1, size=4, most=10)
    assert buffer.allocate(3) == 0
    buffer.slots = torch.arange(3)
    states = torch.arange(6.0).reshape(1, 1, 3, 2)
    buffer.update(states, -states, 0)
    assert buffer.allocate(4) == 3 and buffer.size == 8
    assert buffer.allocate(4) is None and buffer.size == 10  # never beyond its budget
    keys, values = buffer.update(states, -states, 0)
    assert keys.shape == (1, 1, 10, 2)
    assert torch.equal(keys[:, :, :3], states) and torch.equal(values[:, :, :3], -states)


def test_a_range_grows_into_what_is_free_behind_it() -> None:
    pool = Extents(10)
    first, second = pool.allocate(3), pool.allocate(2)
    assert (first, second) == (0, 3)
    assert not pool.extend(0, 3, 4)  # the second is behind it
    assert not pool.extend(3, 2, 8)  # one too many
    assert pool.extend(3, 2, 6) and pool.used == 9
    assert pool.extend(3, 6, 7) and pool.used == 10  # all that is left
    assert not pool.extend(3, 7, 8)
    pool.free(3, 7)
    assert pool.allocate(7) == 3
