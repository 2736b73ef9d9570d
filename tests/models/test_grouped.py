"""Attention of a verifier's rows: what one query gets does not depend on what lies beside it."""

import numpy as np
import pytest
import torch

from dllm.models.grouped import exact_attention, grouped

from ..thin import some


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: np.ndarray, exact: bool = True
) -> torch.Tensor:
    """(heads, n, dh) for ``seen`` (n, n) of the last n keys and all keys before."""
    n = len(seen)
    mask = torch.zeros(1, n, k.shape[1], dtype=q.dtype)
    mask[0, :, -n:].masked_fill_(torch.from_numpy(~seen), torch.finfo(q.dtype).min)
    if exact:
        return exact_attention(q, k, v, 0.4, mask)
    return grouped(q[None], k[None], v[None], 0.4, mask, exact=False)[0]


@pytest.mark.parametrize(("longest", "times"), some([(400, 40), (2000, 12)], 1))
def test_where_keys_lie_changes_no_bit(longest: int, times: int) -> None:
    """Nodes of trees against the chains of their ancestors, in bfloat16.  Without sums in float64
    a few of a million numbers differ."""
    torch.manual_seed(0)
    rng, nodes = np.random.default_rng(0), 16
    for _ in range(times):
        before = int(rng.integers(20, longest))
        q = torch.randn(3, nodes, 64).bfloat16()
        k, v = torch.randn(2, 3, before + nodes, 64).bfloat16()
        seen = np.eye(nodes, dtype=bool)
        for node in range(1, nodes):
            seen[node] |= seen[rng.integers(max(0, node - 6), node)]
        tree = attended(q, k, v, seen)
        for node in range(nodes):
            path = np.flatnonzero(seen[node]).tolist()
            keys = [*range(before), *(before + i for i in path)]
            along = attended(q[:, path], k[:, keys], v[:, keys], np.tri(len(path), dtype=bool))
            assert torch.equal(along[:, -1], tree[:, node])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_is_attention(dtype: torch.dtype) -> None:
    """Against SDPA in float32, up to the rounding of scores and result."""
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 5, 16), torch.randn(3, 30, 16), torch.randn(3, 30, 16)
    seen = np.tri(5, dtype=bool)
    expected = attended(q, k, v, seen, exact=False)
    got = attended(q.to(dtype), k.to(dtype), v.to(dtype), seen)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, atol=1e-5 if dtype == torch.float32 else 0.05,
                               rtol=0.0)  # fmt: skip


def test_many_rows_are_each_row() -> None:
    """In pieces that fit the cache of a processor, and one by one."""
    torch.manual_seed(2)
    q, k, v = torch.randn(9, 2, 3, 8), torch.randn(9, 2, 40, 8), torch.randn(9, 2, 40, 8)
    mask = torch.where(torch.rand(9, 3, 40) < 0.3, -1e9, 0.0)
    for exact in (True, False):
        together = grouped(q, k, v, 0.3, mask, exact)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dllm.models.grouped.WIDE", 2 * 40 * 8)
            pieces = grouped(q, k, v, 0.3, mask, exact)
        alone = torch.cat([grouped(q[i : i + 1], k[i : i + 1], v[i : i + 1], 0.3,
                                   mask[i : i + 1], exact) for i in range(9)])  # fmt: skip
        torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(pieces, alone, atol=1e-6, rtol=1e-5)
