"""A vocabulary split over processes gives the statistics of the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from socket import socket
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm.kernels.statistics import Filters, Share
from dllm.kernels.statistics.parallel import merge_shares, share_partial
from dllm.kernels.statistics.result import OPTIONAL, Inputs

from . import filtered
from .filtered import token_statistics
from .test_statistics import agree, cases, keys, rows_of

Case = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]


def shares(
    hidden: torch.Tensor, weight: torch.Tensor, cuts: list[int], chosen: dict[str, Any]
) -> tuple[Any, Any]:
    """What several processes would find, cut at ``cuts``; None where they would gather logits."""
    names = (*Filters._fields, "tempered", "top", "classes")
    needs = chosen.get("needs")
    options = filtered.options(
        **{name: chosen[name] for name in names if name in chosen},
        needs=OPTIONAL if needs is None else needs,
    )
    names = ("banned", "banned_rows", "noise_keys", "select")
    inputs = Inputs(**{name: chosen.get(name) for name in names})
    bounds = sorted({0, len(weight), *(c for c in cuts if 0 < c < len(weight))})
    sizes = tuple(b - a for a, b in pairwise(bounds))
    if options.top > min(sizes):
        return None, None
    listed = min(20, *sizes) if options.filtered else 0
    parts = [
        share_partial(hidden, Share(weight[a:b], None, sizes, i), options, listed, inputs)
        for i, (a, b) in enumerate(pairwise(bounds))
    ]  # fmt: skip
    return merge_shares(parts, options, listed, len(weight), inputs)


@settings(max_examples=80, deadline=None)
@given(case=cases(), cuts=st.lists(st.integers(1, 616), max_size=3))
def test_any_split_agrees_with_the_oracle(case: Case, cuts: list[int]) -> None:
    hidden, weight, chosen = case
    got, missed = shares(hidden, weight, cuts, chosen)
    if got is None:
        return
    naive = token_statistics(hidden, weight, backend="naive", **chosen)
    if missed is not None:  # the caller does those rows again, from gathered logits
        got, naive = (rows_of(result, (~missed).nonzero().flatten()) for result in (got, naive))
    agree(got, naive)


def test_sharp_rows_are_covered_by_few_candidates() -> None:
    hidden, weight = torch.randn(6, 8) * 6, torch.randn(300, 8)
    chosen = {"temperature": 0.7, "top_p": 0.9, "tempered": True, "noise_keys": keys(6)}
    got, missed = shares(hidden, weight, [100, 150], chosen)
    assert not missed.any()
    agree(got, token_statistics(hidden, weight, backend="naive", **chosen))


def test_ties_across_shards_go_to_the_lowest_id() -> None:
    weight = torch.zeros(90, 2)
    weight[[40, 70], 0] = 3.0
    got, _ = shares(torch.tensor([[1.0, 0.0]]), weight, [45], {"top": 3})
    assert got.token.tolist() == [40] and got.top_token.tolist() == [[40, 70, 0]]


def test_a_share_ends_where_the_vocabulary_does() -> None:
    sizes = (40, 40, 10)
    cut = [Share(torch.randn(n, 2), torch.randn(n), sizes, i).cut(60) for i, n in enumerate(sizes)]
    assert {share.sizes for share in cut} == {(40, 20, 0)}
    assert [len(share.weight) for share in cut] == [40, 20, 0]
    assert [share.first_id for share in cut] == [0, 40, 60]
    assert cut[0].cut(None) is cut[0].cut(60) is cut[0]


STATISTICS = """
from dllm.kernels import noise
from dllm.kernels.statistics import Filters, Share, token_statistics
torch.manual_seed(0)
hidden, weight, bias = torch.randn(7, 16), torch.randn(900, 16), torch.randn(900)
sizes = (433, 467)
low, high = ((0, 433), (433, 900))[rank]
share = Share(weight[low:high], bias[low:high], sizes, rank)
whole = torch.nn.Linear(16, 900)
with torch.no_grad():
    whole.weight.copy_(weight), whole.bias.copy_(bias)
keys = noise.pack_keys([(3, r, r, 1) for r in range(7)])
flat = hidden * torch.linspace(0.01, 2, 7)[:, None]
for x, options in [
    (hidden, {}), (hidden, {"top": 4, "banned": [0, 500], "select": torch.arange(7) * 120}),
    (hidden, {"filters": Filters(0.8), "noise_keys": keys}),
    (flat, {"filters": Filters(0.8, 0.9), "noise_keys": keys, "tempered": True}),
    (hidden, {"filters": Filters(1.0, top_k=9), "noise_keys": keys, "top": 2}),
    (hidden, {"top": 450}), (hidden, {"vocab_size": 800}), (hidden, {"vocab_size": 200}),
    (hidden[:0], {}),
]:
    got = token_statistics(x, share, backend=sys.argv[4], **options)
    want = token_statistics(x, whole, backend="naive" if len(x) else "torch", **options)
    for name in got.__dataclass_fields__:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
"""
GENERATION = """
import dllm
from dllm.kernels.statistics import heads, parallel
from transformers.distributed import DistributedConfig
split = dllm.load(sys.argv[3], distributed_config=DistributedConfig(tp_size=2))
whole = dllm.load(sys.argv[3])
share = heads.split_linear(split.head)
assert share.sizes == (128, 128) and share.weight.shape[0] == 128 and share.rank == rank
assert heads.split_linear(whole.head) is None
calls, original = [], parallel.token_statistics
def spy(*args, **kwargs):
    calls.append(len(args[0]))
    return original(*args, **kwargs)
parallel.token_statistics = spy
prompt = list(range(5, 14))
for options in (
    {"cache": "dual"}, {"sampler": "klass"}, {"sampler": "wino", "cache": "none"},
    {"temperature": 0.8, "seed": 1, "top_p": 0.9, "cache": "prefix"},
):
    options |= {"max_new_tokens": 16, "block_length": 8}
    a, b = (dllm.generate(m, prompt, **options) for m in (split, whole))
    assert a.tokens == b.tokens and a.nfe == b.nfe, (options, a.tokens, b.tokens)
    near = {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), **near)
    assert len(calls) == a.nfe, (len(calls), a.nfe)
    calls.clear()
split.head.register_forward_hook(lambda module, args, output: output)
assert heads.split_linear(split.head) is None
"""


def on_two_processes(program: str, tmp_path: Path, *arguments: str) -> None:
    """Run ``program`` as both ranks of a group over gloo."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = """
import sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
"""
    end = "\ndist.destroy_process_group()\nprint('agreed')"
    names = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(port), "TRITON_INTERPRET": "1"}  # fmt: skip
    running = [
        subprocess.Popen(
            [sys.executable, "-c", start + program + end, str(rank), str(tmp_path / "store"),
             *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **names, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in running:
            out, error = process.communicate(timeout=120)
            assert out.strip().endswith("agreed"), error[-2000:]
    finally:  # one that failed leaves the other waiting
        for process in running:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_two_processes(tmp_path: Path, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    on_two_processes(STATISTICS, tmp_path, "", backend)


@pytest.mark.slow
def test_a_model_split_over_processes_generates_the_same(tmp_path: Path) -> None:
    """Tensor parallelism as transformers does it; statistics of the head's shares are merged."""
    checkpoint = Path(__file__).parents[1] / "golden" / "data" / "llada-tiny"
    on_two_processes(GENERATION, tmp_path, str(checkpoint))
