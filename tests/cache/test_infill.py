"""Holes in a text, with every cache: wherever they lie, the text around them stays."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import pytest

import dllm

from ..settings import EXACT, OWN_MODELS, SMALL
from ..thin import some
from .test_every_pair import MODELS, load, refused

TEXTS = {
    "all holes": (-1,) * 6,
    "holes at both ends": (-1, 5, 6, 40, -1),
    "more than a block": (5, *(-1,) * 33, 9, -1, 7),
}
CACHES = [spec for name, spec in SMALL.items() if name not in OWN_MODELS]
SAMPLER = "llada(remasking=random)"  # goes with every cache


@lru_cache
def filled(name: str, text: Sequence[int], cache: str) -> list[int]:
    return dllm.infill(load(name), list(text), sampler=SAMPLER, cache=cache).tokens


@pytest.mark.parametrize(("name", "cache", "kind"), some(product(MODELS, CACHES, TEXTS), 7))
def test_the_text_around_the_holes_stays(name: str, cache: str, kind: str) -> None:
    text = TEXTS[kind]
    assert not refused(name, SAMPLER, cache)
    result = filled(name, text, cache)
    assert len(result) == len(text)
    assert all(a == b for a, b in zip(text, result, strict=True) if a >= 0)
    assert load(name).facts.mask_token_id not in result


@pytest.mark.parametrize(("name", "cache"), some(product(MODELS, EXACT), 5))
def test_exact_settings_fill_like_no_cache(name: str, cache: str) -> None:
    text = TEXTS["holes at both ends"]
    assert filled(name, text, cache) == filled(name, text, "none")
