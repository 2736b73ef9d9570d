"""Temperature and filters of proposals: which ids are left, and how often each is drawn."""

from typing import Any

import numpy as np
import pytest
import torch

from .filtered import logits_statistics
from .test_statistics import agree, keys


@pytest.mark.parametrize("top_p, top_k, min_p, expected", [
    (0.65, 0, 0.0, [0, 1]),  # 0.4, then 0.7 crosses and stays
    (0.1, 0, 0.0, [0]),
    (1.0, 2, 0.0, [0, 1, 2]),  # the third equals the second
    (1.0, 1, 0.0, [0]),
    (0.6, 2, 0.0, [0, 1]),  # the tie with the second was taken away by top-p before
    (0.95, 3, 0.0, [0, 1, 2]),
    (1.0, 0, 0.49, [0, 1, 2]),  # what has at least 0.196
    (1.0, 0, 0.6, [0, 1]),
    (0.65, 0, 0.1, [0, 1]),
    (1.0, 3, 0.6, [0, 1, 2]),
    (1.0, 0, 1.0, [0]),
])  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_filters(
    top_p: float, top_k: int, min_p: float, expected: list[int], temperature: float
) -> None:
    tied = top_k > 0
    p = torch.tensor([0.4, 0.25, 0.25, 0.08, 0.02] if tied else [0.4, 0.3, 0.2, 0.08, 0.02])
    got = logits_statistics(
        p.log()[None], top_p=top_p, top_k=top_k, min_p=min_p, tempered=True, top=5,
        temperature=temperature, noise_keys=keys(1),
    )  # fmt: skip
    left = [t for t, lp in zip(got.top_token[0].tolist(), got.top_logprob[0].tolist(), strict=True)
            if lp > -np.inf]  # fmt: skip
    assert left == expected
    kept = p[expected] / p[expected].sum()
    assert got.max_logprob.item() == pytest.approx(kept[0].log().item(), abs=1e-6)
    assert got.gap.item() == pytest.approx((p[0] / p[1]).log().item(), abs=1e-6)


@pytest.mark.parametrize(("k_first", "expected"), [(False, 3), (True, 2)])
@pytest.mark.parametrize("backend", ["torch", "naive"])
def test_the_order_of_filters(k_first: bool, expected: int, backend: str) -> None:
    """Of 0.4, 0.3, 0.2, ... the third crosses 0.75; of the three alone the second does."""
    p = torch.tensor([[0.4, 0.3, 0.2, 0.08, 0.02]])
    how: dict[str, Any] = {"top_p": 0.75, "top_k": 3, "k_first": k_first, "tempered": True}
    got = logits_statistics(p.log(), backend=backend, top=5, **how)
    assert int((got.top_logprob > -torch.inf).sum()) == expected


@pytest.mark.parametrize("top_k", [0, 2000])
def test_a_nucleus_wider_than_the_candidates(top_k: int) -> None:
    logits = torch.randn(3, 5000) * 0.1
    logits[1, 7] = 30.0  # one narrow nucleus among wide ones
    logits[2, ::2] = 0.05  # ties at the border
    chosen: dict[str, Any] = {"top_p": 0.8, "tempered": True, "select": torch.tensor([0, 0, 4998])}
    chosen |= {"top_k": top_k, "k_first": True}
    got = logits_statistics(logits, **chosen)
    expected = logits_statistics(logits, backend="naive", **chosen)
    torch.testing.assert_close(got.entropy, expected.entropy, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got.select_logprob, expected.select_logprob, rtol=1e-4, atol=1e-6)


def chi_square(counts: np.ndarray[Any, Any], p: np.ndarray[Any, Any]) -> float:
    """Statistic minus degrees of freedom, in standard deviations; cells under 5 are pooled."""
    expected = p * counts.sum()
    assert counts[p == 0].sum() == 0
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    freedom = len(expected) - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("temperature, top_p, top_k", [
    (1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.8, 0), (1.5, 1.0, 4), (0.9, 0.9, 6),
])  # fmt: skip
def test_samples_follow_the_softmax(temperature: float, top_p: float, top_k: int) -> None:
    n, size = 40_000, 12
    x = torch.randn(size, generator=torch.Generator().manual_seed(3)) * 1.5
    names = torch.zeros(n, 4, dtype=torch.int64)
    names[:, 0], names[:, 2] = 77, torch.arange(n)
    got = logits_statistics(
        x.expand(n, size), temperature=temperature, top_p=top_p, top_k=top_k, noise_keys=names,
        needs=(),
    )  # fmt: skip
    distribution = logits_statistics(
        x[None], temperature=temperature, top_p=top_p, top_k=top_k, tempered=True, top=size,
        noise_keys=names[:1], backend="naive",
    )  # fmt: skip
    p = np.zeros(size)
    p[distribution.top_token[0]] = distribution.top_logprob[0].double().exp()
    counts = np.bincount(got.token.numpy(), minlength=size).astype(float)
    assert chi_square(counts, p) < 4.5
    assert chi_square(counts, np.roll(np.where(p > 0, p, 0) + 1e-12, 1)) > 100  # has power
    # log-probabilities are those of the clean distribution
    torch.testing.assert_close(got.logprob, x.log_softmax(0)[got.token], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "naive"])
@pytest.mark.parametrize("filters", [{}, {"tempered": True, "top_p": 0.7}])
def test_temperatures_next_to_zero_are_zero(backend: str, filters: dict[str, Any]) -> None:
    logits = 50 * torch.randn(4, 60)
    logits[:, 40] = logits[:, 50] = 400.0  # a tie, which noise would break
    for temperature in (1e-40, 1e-9):
        result = logits_statistics(
            logits, temperature=temperature, noise_keys=keys(4), backend=backend, **filters
        )
        agree(result, logits_statistics(logits, backend=backend, **filters))
        assert result.token.tolist() == [40] * 4
