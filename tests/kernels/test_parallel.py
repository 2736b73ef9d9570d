"""A vocabulary split over processes gives the statistics of the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm.kernels.statistics import TokenStatistics, token_statistics
from dllm.kernels.statistics.parallel import merge_shards, shard_partial
from dllm.kernels.statistics.result import FIELDS, OPTIONAL, Options

from .test_statistics import agree, cases, keys

Case = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]


def shards(
    hidden: torch.Tensor, weight: torch.Tensor, cuts: list[int], chosen: dict[str, Any]
) -> tuple[Any, Any]:
    names = ("temperature", "top_p", "top_k", "tempered", "top")
    needs = chosen.get("needs")
    options = Options(
        **{name: chosen[name] for name in names if name in chosen},
        needs=OPTIONAL if needs is None else needs,
    )
    rest = {n: v for n, v in chosen.items() if n not in (*names, "needs")}
    bounds = sorted({0, len(weight), *(c for c in cuts if 0 < c < len(weight))})
    pairs = list(pairwise(bounds))
    listed = min(20, *(b - a for a, b in pairs)) if len(pairs) > 1 else 20
    listed = min(listed, len(weight))
    if options.top > min(b - a for a, b in pairs):
        return None, None
    parts = [
        shard_partial(hidden, weight[a:b], options, first_id=a, listed=listed, **rest)
        for a, b in pairs
    ]
    return merge_shards(
        parts, options, len(weight), rest.get("noise_keys"), rest.get("select"), listed
    )


def rows_of(found: TokenStatistics, rows: torch.Tensor) -> TokenStatistics:
    columns = {f: getattr(found, f) for f in FIELDS}
    return TokenStatistics(**{f: None if x is None else x[rows] for f, x in columns.items()})


@settings(max_examples=80, deadline=None)
@given(case=cases(), cuts=st.lists(st.integers(1, 616), max_size=3))
def test_any_split_agrees_with_the_oracle(case: Case, cuts: list[int]) -> None:
    hidden, weight, chosen = case
    got, missed = shards(hidden, weight, cuts, chosen)
    if got is None:
        return
    naive = token_statistics(hidden, weight, backend="naive", **chosen)
    if missed is not None:  # the caller does those rows again, from gathered logits
        got, naive = (rows_of(found, (~missed).nonzero().flatten()) for found in (got, naive))
    agree(got, naive)


def test_sharp_rows_are_covered_by_few_candidates() -> None:
    hidden, weight = torch.randn(6, 8) * 6, torch.randn(300, 8)
    chosen = {"temperature": 0.7, "top_p": 0.9, "tempered": True, "noise_keys": keys(6)}
    got, missed = shards(hidden, weight, [100, 150], chosen)
    assert not missed.any()
    agree(got, token_statistics(hidden, weight, backend="naive", **chosen))


def test_ties_across_shards_go_to_the_lowest_id() -> None:
    weight = torch.zeros(90, 2)
    weight[[40, 70], 0] = 3.0
    got, _ = shards(torch.tensor([[1.0, 0.0]]), weight, [45], {"top": 3})
    assert got.token.tolist() == [40] and got.top_token.tolist() == [[40, 70, 0]]


PROGRAM = """
import sys, torch, torch.distributed as dist
from dllm.kernels import noise
from dllm.kernels.statistics import TokenStatistics, token_statistics
from dllm.kernels.statistics.parallel import parallel_statistics
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
hidden, weight = torch.randn(7, 16), torch.randn(900, 16)
low, high = ((0, 433), (433, 900))[rank]
keys = noise.pack_keys([(3, r, r, 1) for r in range(7)])
flat = hidden * torch.linspace(0.01, 2, 7)[:, None]
for x in (hidden, flat):
    for options in (
        {}, {"top": 4, "banned": [0, 500], "select": torch.arange(7) * 120},
        {"temperature": 0.8, "noise_keys": keys},
        {"temperature": 0.8, "noise_keys": keys, "top_p": 0.9, "tempered": True},
        {"temperature": 1.0, "noise_keys": keys, "top_k": 9, "top": 2}, {"top": 500},
    ):
        got = parallel_statistics(x, weight[low:high], first_id=low, size=900, **options)
        want = token_statistics(x, weight, backend="naive", **options)
        for name in got.__dataclass_fields__:
            a, b = getattr(got, name), getattr(want, name)
            assert (a is None) == (b is None), name
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
dist.destroy_process_group()
print("agreed")
"""


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in running:
        out, error = process.communicate(timeout=120)
        assert out.strip() == "agreed", error[-2000:]
