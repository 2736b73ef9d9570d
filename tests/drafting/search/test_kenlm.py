"""The KenLM proxy on a model small enough to write down."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dllm
from dllm.drafting import register_all
from dllm.drafting.base import single
from dllm.drafting.search.chains import SearchContext
from dllm.drafting.search.marginals import Marginals
from dllm.drafting.search.paths import CausalPathSearch
from dllm.drafting.search.proxies import PROXIES, KenLM, Proxy

# base-10 log-probability, n-gram, back-off
ARPA = """\\data\\
ngram 1=6
ngram 2=3
ngram 3=1

\\1-grams:
-2.0\t<unk>\t0
-99\t<s>\t0
-1.0\t</s>\t0
-0.5\t7\t-0.3
-0.7\t8\t-0.2
-0.9\t9\t0

\\2-grams:
-0.1\t7 8\t-0.4
-0.6\t8 7\t0
-0.2\t8 9\t0

\\3-grams:
-0.05\t7 8 9

\\end\\
"""


@pytest.fixture
def proxy(tmp_path: Path) -> Proxy:
    pytest.importorskip("kenlm")
    file = tmp_path / "tiny.arpa"
    file.write_text(ARPA)
    register_all()
    return single(f"kenlm(path='{file}')", PROXIES, Proxy)


def log10(values: list[float]) -> list[float]:
    return [value / math.log(10) for value in values]


def test_conditionals_in_natural_logarithms(proxy: Proxy) -> None:
    """Known n-grams as written, others by backing off, unknown ids as <unk>."""
    after_7 = proxy.start([9, 7])
    assert log10(proxy.logprobs(after_7, [8, 9, 7, 42])) == pytest.approx(
        [-0.1, -0.3 - 0.9, -0.3 - 0.5, -0.3 - 2.0], abs=1e-5
    )
    after_78 = proxy.advance(after_7, 8)
    assert log10(proxy.logprobs(after_78, [9, 7])) == pytest.approx([-0.05, -0.4 - 0.6], abs=1e-5)
    assert log10(proxy.logprobs(proxy.start([8]), [9])) == pytest.approx([-0.2], abs=1e-5)
    again = proxy.logprobs(after_7, [8])  # states are not changed by advancing
    assert log10(again) == pytest.approx([-0.1], abs=1e-5)


def test_it_steers_the_path_search(proxy: Proxy) -> None:
    """The marginals prefer 8 8; the model has seen 8 9."""
    p = torch.full((2, 12), 1e-6)
    p[0, [8, 7]] = torch.tensor([0.6, 0.4])
    p[1, [8, 9]] = torch.tensor([0.5, 0.45])
    marginals = Marginals((p / p.sum(1, keepdim=True)).log(), 1)
    context = SearchContext(np.array([7]), proxy)
    assert marginals.argmax.tolist() == [8, 8]
    result = CausalPathSearch(mass=0.99).find(marginals, 2, context)
    assert result.tokens.tolist() == [8, 9]


def test_a_missing_model_is_said(tmp_path: Path) -> None:
    pytest.importorskip("kenlm")
    with pytest.raises(dllm.ConfigError, match="no KenLM model"):
        KenLM(path=str(tmp_path / "none.arpa"))


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kenlm", None)
    with pytest.raises(dllm.ConfigError, match=r"\.\[kenlm\]"):
        KenLM(path="x.arpa")
