"""Token statistics against a float64 oracle, over shapes, dtypes, options and tile borders."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dllm.core.errors import ConfigError, UnknownNameError
from dllm.kernels import noise
from dllm.kernels.statistics import (
    TokenClasses,
    TokenStatistics,
)
from dllm.kernels.statistics import torch as fast
from dllm.kernels.statistics.result import FIELDS

from .filtered import logits_statistics, token_statistics


def agree(a: TokenStatistics, b: TokenStatistics, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Ids equal, numbers close, the same fields present."""
    for name in FIELDS:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is None:
            continue
        assert x.dtype == y.dtype and x.shape == y.shape, name
        if x.dtype == torch.int64:
            assert torch.equal(x, y), name
        else:
            torch.testing.assert_close(
                x, y, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )


def rows_of(result: TokenStatistics, rows: torch.Tensor) -> TokenStatistics:
    columns = {f: getattr(result, f) for f in FIELDS}
    return TokenStatistics(**{f: None if x is None else x[rows] for f, x in columns.items()})


def clear_of_borders(logits: torch.Tensor, chosen: dict[str, Any]) -> bool:
    """Whether no nucleus ends so near ``top_p`` that rounding says which token is its last."""
    if chosen["top_p"] >= 1:
        return True
    x = logits.double()
    for j, token in enumerate(chosen["banned"] or ()):
        if token < x.shape[1]:
            rows = chosen["banned_rows"][:, j] if "banned_rows" in chosen else slice(None)
            x[rows, token] = -torch.inf
    p = (x / (chosen["temperature"] or 1.0)).softmax(1).sort(1, descending=True).values
    return not bool(((p.cumsum(1) - chosen["top_p"]).abs() <= 1e-6).any())


def keys(rows: int, seed: int = 5) -> torch.Tensor:
    return noise.pack_keys([(seed, r, 3 * r, 1) for r in range(rows)])


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of some hundred logits, so that a few rows meet many borders."""
    monkeypatch.setattr(fast, "TILE_BYTES", 4 * 300)
    monkeypatch.setattr(fast, "PIECE", 100)
    monkeypatch.setattr(fast, "MOST_ROWS", 6)


def options(draw: st.DrawFn, rows: int, size: int) -> dict[str, Any]:
    temperature = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7]))
    banned = draw(st.none() | st.lists(st.integers(0, size), max_size=3))
    chosen: dict[str, Any] = {
        "temperature": temperature,
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.9, 0.4, 0.0])),
        "top_k": draw(st.sampled_from([0, 0, 1, 5, 10_000])),
        "k_first": draw(st.booleans()),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.05, 0.4])),
        "tempered": draw(st.booleans()),
        "noise_keys": keys(rows, draw(st.integers(0, 99))) if temperature else None,
        "top": draw(st.integers(0, 7)),
        "banned": banned,
        "needs": draw(st.none() | st.frozensets(st.sampled_from(["margin", "gap", "entropy"]))),
    }
    if banned is not None and draw(st.booleans()):
        pick = st.lists(st.booleans(), min_size=rows * len(banned), max_size=rows * len(banned))
        chosen["banned_rows"] = torch.tensor(draw(pick), dtype=torch.bool).view(rows, -1)
    if draw(st.booleans()):
        count = draw(st.integers(1, 9))
        of = np.random.default_rng(draw(st.integers(0, 99))).integers(-1, count, size)
        chosen["classes"] = TokenClasses(of, count + 1)
    if draw(st.booleans()):
        ids = st.lists(st.integers(0, size - 1), min_size=rows, max_size=rows)
        chosen["select"] = torch.tensor(draw(ids))
    return chosen


SIZES = (1, 2, 3, 49, 50, 51, 100, 299, 300, 301, 617)


@st.composite
def cases(
    draw: st.DrawFn, sizes: tuple[int, ...] = SIZES
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    rows = draw(st.integers(1, 9))
    size = draw(st.sampled_from(sizes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    hidden = torch.randn(rows, 8, generator=generator)
    weight = torch.randn(size, 8, generator=generator)
    return hidden, weight, options(draw, rows, size)


@pytest.mark.usefixtures("small_tiles")
class TestAgainstTheOracle:
    @settings(max_examples=60, deadline=None)
    @given(case=cases())
    def test_tiled_float32(self, case: tuple[torch.Tensor, torch.Tensor, dict[str, Any]]) -> None:
        hidden, weight, chosen = case
        assume(clear_of_borders(hidden @ weight.T, chosen))
        agree(
            token_statistics(hidden, weight, **chosen),
            token_statistics(hidden, weight, backend="naive", **chosen),
        )

    @settings(max_examples=60, deadline=None)
    @given(case=cases(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    def test_logits(
        self, case: tuple[torch.Tensor, torch.Tensor, dict[str, Any]], dtype: torch.dtype
    ) -> None:
        # the logits are given: half precision must cost nothing beyond float32 rounding
        hidden, weight, chosen = case
        logits = (hidden @ weight.T).to(dtype)
        assume(clear_of_borders(logits, chosen))
        before = logits.clone()
        agree(
            logits_statistics(logits, **chosen),
            logits_statistics(logits, backend="naive", **chosen),
        )
        assert torch.equal(logits, before)

    def test_bias_and_padding_rows(self) -> None:
        head = nn.Linear(8, 333)
        hidden = torch.randn(5, 8)
        got = token_statistics(hidden, head, vocab_size=320, top=3)
        logits = head(hidden).detach()[:, :320]
        agree(got, logits_statistics(logits, top=3, backend="naive"))

    def test_a_tie_across_tiles_goes_to_the_lowest_id(self) -> None:
        for first, second in [(0, 299), (49, 50), (99, 100), (150, 151), (250, 298)]:
            weight = torch.zeros(300, 2)
            weight[first, 0] = weight[second, 0] = 3.0
            got = token_statistics(torch.tensor([[1.0, 0.0]] * 6), weight, top=4)
            assert (got.token == first).all()
            others = [t for t in range(4) if t not in (first, second)][:2]
            assert got.top_token[3].tolist() == [first, second, *others]
            assert (got.margin == 0).all() and (got.gap == 0).all()

    def test_tiles_in_which_all_is_banned(self) -> None:
        hidden, weight = torch.randn(6, 8), torch.randn(300, 8)
        for banned in (range(100), range(50, 250), range(1, 300), range(300)):
            chosen: dict[str, Any] = {"banned": banned, "top": 2, "select": torch.arange(6) * 55}
            agree(
                token_statistics(hidden, weight, **chosen),
                token_statistics(hidden, weight, backend="naive", **chosen),
            )

    def test_no_rows(self) -> None:
        for size in (10, 1000):
            got = token_statistics(torch.randn(0, 8), torch.randn(size, 8), top=2)
            assert got.token.shape == (0,) and got.top_token.shape == (0, 2)
            assert got.entropy.shape == (0,)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that operations make."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.layout == torch.strided:
                self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return result


def test_the_logits_of_a_large_vocabulary_never_exist_together() -> None:
    hidden, weight = torch.randn(1100, 4), torch.randn(9001, 4)
    with Largest() as largest:
        got = token_statistics(
            hidden, weight, banned=[9000, 0], top=2, select=torch.arange(1100) * 8
        )
    assert largest.bytes <= fast.TILE_BYTES < 4 * 1100 * 9001
    some = torch.tensor([0, 500, 1023, 1024, 1099])
    expected = logits_statistics(
        hidden[some] @ weight.T, banned=[9000, 0], top=2, select=some * 8, backend="naive"
    )
    agree(rows_of(got, some), expected)


@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_rows_that_allow_nothing(temperature: float, tempered: bool) -> None:
    logits = torch.randn(3, 600)
    logits[1] = -torch.inf
    logits[2, 1:] = -torch.inf
    for top_p, size in [(1.0, 600), (0.9, 600), (1.0, 1)]:
        got = logits_statistics(
            logits[:, :size], temperature=temperature, tempered=tempered, top_p=top_p, top=1,
            noise_keys=keys(3), select=torch.tensor([0, 0, 0]),
        )  # fmt: skip
        for name in ("logprob", "max_logprob", "select_logprob"):
            assert getattr(got, name)[1] == -torch.inf
            assert abs(getattr(got, name)[2]) < 1e-30
        assert got.token[1:].tolist() == [0, 0] and got.top_logprob[1, 0] == -torch.inf
        assert got.margin[1:].tolist() == [0, 1] and got.gap[1:].tolist() == [0, torch.inf]
        assert (got.entropy[1:].abs() < 1e-28).all()
        of = TokenClasses(np.zeros(size, np.int64), 1)
        classes = logits_statistics(
            logits[:, :size], temperature=temperature, tempered=tempered, noise_keys=keys(3),
            classes=of,
        )  # fmt: skip
        assert classes.class_logprob[1:, 0].tolist() == [-torch.inf, pytest.approx(0, abs=1e-6)]


def test_bans_hold_in_their_rows_only() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0, 3.0]]).repeat(3, 1)
    rows = torch.tensor([[True, True], [False, False], [True, False]])
    got = logits_statistics(logits, banned=torch.tensor([1, 2]), banned_rows=rows)
    assert got.token.tolist() == [3, 1, 2]
    everywhere = logits_statistics(logits, banned=[1, 2], select=torch.tensor([1, 0, 3]))
    assert everywhere.token.tolist() == [3, 3, 3]
    assert everywhere.select_logprob[0] == -torch.inf
    assert everywhere.select_logprob[1] == pytest.approx(-3 - np.log1p(np.exp(-3)))


def test_log_probabilities_near_zero_keep_their_precision() -> None:
    logits = torch.tensor([[30.0, 0.0, -1.0], [40.0, 0.0, -1.0]])
    got = logits_statistics(logits)
    exact = -np.log1p(np.exp([-30.0, -40.0]) * (1 + np.exp(-1)))
    np.testing.assert_allclose(got.logprob.numpy(), exact, rtol=1e-6)
    assert (got.entropy > 0).all()


def test_a_row_does_not_see_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    # small integers: every product is exact, so results cannot depend on how rows are multiplied
    hidden = torch.randint(-2, 3, (12, 8)).float()
    weight = torch.randint(-2, 3, (700, 8)).float()
    names = keys(12)
    whole = token_statistics(hidden, weight, temperature=0.8, noise_keys=names, top=3)
    pick = torch.tensor([11, 4])
    alone = token_statistics(hidden[pick], weight, temperature=0.8, noise_keys=names[pick], top=3)
    monkeypatch.setattr(fast, "TILE_BYTES", 4 * 1001)
    monkeypatch.setattr(fast, "PIECE", 333)
    tiled = token_statistics(hidden, weight, temperature=0.8, noise_keys=names, top=3)
    assert torch.equal(whole.token[pick], alone.token) and torch.equal(whole.token, tiled.token)
    assert torch.equal(whole.top_token, tiled.top_token)
    torch.testing.assert_close(whole.logprob[pick], alone.logprob, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(whole.logprob, tiled.logprob, rtol=1e-6, atol=1e-6)


class Doubled(nn.Linear):
    """A linear layer that is not what its weight says, like a quantised one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_heads_that_must_be_called() -> None:
    hidden, inner = torch.randn(5, 8), nn.Linear(8, 90, bias=False)
    hooked = nn.Linear(8, 90, bias=False)
    hooked.weight = inner.weight
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    doubled = Doubled(8, 90, bias=False)
    doubled.weight = inner.weight
    patched = nn.Linear(8, 90, bias=False)
    patched.forward = lambda h: 2 * inner(h)  # type: ignore[method-assign]
    expected = token_statistics(hidden, 2 * inner.weight.detach(), vocab_size=80, top=2)
    for head in (hooked, doubled, patched, lambda h: 2 * inner(h)):
        agree(token_statistics(hidden, head, vocab_size=80, top=2), expected)


def test_called_heads_see_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "TILE_BYTES", 4 * 200)
    seen = []
    weight = torch.randn(90, 8)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return hidden @ weight.T

    hidden = torch.randn(5, 8)
    agree(token_statistics(hidden, head), token_statistics(hidden, weight))
    assert max(seen) == 2 and sum(seen) >= 5


def test_zeros_of_either_sign_are_a_tie() -> None:
    got = logits_statistics(torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]]), top=3)
    assert got.token.tolist() == [1, 1] and got.top_token.tolist() == [[1, 2, 0]] * 2


def test_only_what_is_needed() -> None:
    logits = torch.randn(4, 30)
    got = logits_statistics(logits, needs=frozenset({"gap", "top_token", "unheard of"}))
    present = {f for f in FIELDS if getattr(got, f) is not None}
    assert present == {"token", "logprob", "gap"}
    full = logits_statistics(logits)
    assert torch.equal(got.gap, full.gap) and torch.equal(got.logprob, full.logprob)
    absent = {f for f in FIELDS if getattr(full, f) is None}
    classes = {f for f in FIELDS if f.startswith("class_")}
    assert absent == {"top_token", "top_logprob", "select_logprob", *classes}


def test_numpy() -> None:
    got = logits_statistics(torch.randn(4, 30), top=3)
    host = got.numpy()
    assert host.select_logprob is None and host.token.dtype == np.int64
    for name in (f for f in FIELDS if getattr(got, f) is not None):
        assert isinstance(getattr(host, name), np.ndarray)
        assert np.array_equal(getattr(host, name), getattr(got, name).numpy())


def test_gradients_are_not_recorded() -> None:
    hidden, head = torch.randn(3, 8, requires_grad=True), nn.Linear(8, 40)
    assert not token_statistics(hidden, head).logprob.requires_grad
    assert not logits_statistics(head(hidden)).logprob.requires_grad


@pytest.mark.parametrize("wrong", [
    {"temperature": 1.0}, {"temperature": 1.0, "noise_keys": torch.zeros(2, 4)},
    {"temperature": -1.0}, {"top_k": -1}, {"top": -1},
    {"temperature": math.inf, "noise_keys": keys(3)},
    {"temperature": math.nan, "noise_keys": keys(3)},
])  # fmt: skip
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        logits_statistics(torch.randn(3, 5), **wrong)


def test_unknown_backend() -> None:
    with pytest.raises(UnknownNameError, match="did you mean"):
        logits_statistics(torch.randn(3, 5), backend="troch")


def test_rows_that_are_not_finite_fail_with_classes_too() -> None:
    """Their log-probabilities say so, and no other row is touched."""
    logits = torch.randn(3, 40)
    whole = logits_statistics(logits, classes=TokenClasses(np.arange(40) % 4, 4))
    logits[1] = torch.nan
    got = logits_statistics(logits, classes=TokenClasses(np.arange(40) % 4, 4))
    assert got.logprob[1].isnan()
    for column in ("class_token", "class_token_logprob", "class_logprob"):
        assert torch.equal(getattr(got, column)[::2], getattr(whole, column)[::2])
