"""What a walk over the head carries: expected embeddings, draws by one number, bent logits."""

from typing import Any

import pytest
import torch
from torch import nn

from dllm.core.errors import ConfigError
from dllm.kernels import linear
from dllm.kernels.statistics import Filters, Shaped, TokenClasses, token_statistics

from ..thin import covering, some

SETTINGS: list[dict[str, Any]] = [
    {},
    {"filters": Filters(1.0), "top": 1},
    {"filters": Filters(0.7)},
    {"filters": Filters(0.7, top_p=0.8)},
    {"filters": Filters(1.3, top_k=5), "tempered": True},
    {"filters": Filters(1.0), "floor": 0.25, "lowered": 3.5},
    {"filters": Filters(0.8, top_p=0.9), "floor": 0.6, "lowered": 2.0, "tempered": True},
]


def both(rows: int, size: int, how: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """The float64 oracle, and the walk in tiles."""
    generator = torch.Generator().manual_seed(rows + size)
    weight = (torch.randn(size, 24, generator=generator) * 0.5).to(dtype)
    hidden = torch.randn(rows, 24, generator=generator).to(dtype)
    how = {**how, "embeddings": lambda low, high: weight[low:high], "banned": [7]}
    if "filters" in how:
        how["uniforms"] = torch.rand(rows, generator=generator)
    if "lowered" in how:
        ids = torch.randint(size, (rows,), generator=generator)
        how |= {"lowered": (ids, how["lowered"]), "select": ids}
    head = Shaped(weight, 5.0, 1 / 0.6)
    return tuple(token_statistics(hidden, head, backend=name, **how) for name in ("naive", "torch"))  # type: ignore[return-value]


@pytest.mark.parametrize(("how", "size"), covering(SETTINGS, [64, 40_000]))
@pytest.mark.usefixtures("kernels")
def test_the_walk_is_the_naive_product(how: dict[str, Any], size: int) -> None:
    oracle, walk = both(20, size, how, torch.float32)
    assert torch.equal(oracle.token, walk.token)
    for name in ("logprob", "entropy", "select_logprob", "soft"):
        wanted, found = getattr(oracle, name), getattr(walk, name)
        assert (wanted is None) == (found is None)
        if wanted is not None:
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", some([64, 40_000], 1))
def test_many_tiles_are_one(size: int) -> None:
    """More rows make narrower tiles; each row draws and expects the same."""
    how = {"filters": Filters(1.0)}
    oracle, walk = both(600 if size > 64 else 40, size, how, torch.float32)
    assert (oracle.token == walk.token).float().mean() > 0.995  # at borders float32 decides
    torch.testing.assert_close(walk.soft, oracle.soft, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("size", some([64, 40_000], 1))
def test_the_uniform_part_leaves_out_what_is_banned(size: int) -> None:
    """In every tile, and in the rows that a ban is of."""
    banned = torch.arange(0, size, 2)[:32]
    rows = torch.arange(400)[:, None].expand(-1, len(banned)) % 2 == 0
    drawn = token_statistics(
        torch.zeros(400, 8), torch.ones(size, 8), filters=Filters(1.0), floor=0.9, banned=banned,
        banned_rows=rows, uniforms=(torch.arange(400) + 0.5) / 400 * (64 / size),
    )  # fmt: skip
    assert drawn.logprob.isfinite().all()
    odd = drawn.token[::2] % 2 == 1
    assert odd.all() if size == 64 else odd[: len(odd) // 3].all()
    assert (drawn.token[1::2] % 2 == 0).any()


def test_half_precision_stays_within_its_noise() -> None:
    oracle, walk = both(20, 4_000, {}, torch.bfloat16)
    assert (walk.soft - oracle.soft).abs().max() < 2**-7  # weights are rounded to 8 bits


@pytest.mark.skipif(not linear.available(), reason="no AVX2, or no oneDNN")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", linear.dtypes() if linear.available() else [])
def test_what_a_row_expects_does_not_depend_on_others(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head, hidden = nn.Linear(128, 1000, bias=False).to(dtype), torch.randn(300, 128).to(dtype)
    linear.pack(head)
    with torch.inference_mode():
        whole: Any = token_statistics(hidden, head, embeddings=lambda *at: head.weight[slice(*at)])
        for rows in (slice(1), slice(5, 7), slice(10, 43), slice(100, None)):
            alone: Any = token_statistics(
                hidden[rows], head, embeddings=lambda *at: head.weight[slice(*at)]
            )
            assert torch.equal(alone.soft, whole.soft[rows])


def test_draws_follow_their_distribution() -> None:
    """Numbers at equal distances hit every token as often as it is likely."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    count = 10_000
    shares = (torch.arange(count) + 0.5) / count
    drawn = token_statistics(
        logits.expand(count, -1), None, filters=Filters(1.0), uniforms=shares
    ).token
    found = torch.bincount(drawn, minlength=5) / count
    torch.testing.assert_close(found, logits.softmax(-1)[0], atol=1.5e-4, rtol=0)


def test_classes_are_drawn_by_noise() -> None:
    import numpy as np

    classes = TokenClasses(np.zeros(5, np.int64), 1)
    with pytest.raises(ConfigError, match="uniforms"):
        token_statistics(
            torch.zeros(1, 5), None, filters=Filters(1.0), uniforms=torch.rand(1), classes=classes
        )
