"""Length controllers on scripted signals; lookup drafters; composites."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import dllm
from dllm.drafting import available, register_all
from dllm.drafting.base import (
    DRAFTERS,
    Budget,
    Draft,
    Drafter,
    DraftRequest,
    Feedback,
    RoundStats,
    single,
)
from dllm.drafting.drafters.history import BORDER, History
from dllm.drafting.drafters.hits import HitRates
from dllm.drafting.length.control import CONTROLLERS, LengthController
from dllm.drafting.length.lengths import AdaptiveDraftLength

register_all()


def tell(
    controller: LengthController, drafted: int, accepted: int, end: int | None = None,
    seconds: float = 0.01, sure: Any = 0.9, draft_seconds: float = 0.001,
    attempted: bool | None = None, context: int = 100,
) -> None:  # fmt: skip
    confidence = np.broadcast_to(sure, 64)[:drafted] if np.ndim(sure) == 0 else sure[:drafted]
    draft = Draft(np.arange(drafted), confidence=confidence, end=end)
    feedback = Feedback(draft, list(range(accepted)), list(range(accepted + 1)))
    asked = drafted > 0 if attempted is None else attempted
    stats = RoundStats(drafted, drafted, accepted, accepted + 1, "correction", "", draft_seconds,
                       0.0, seconds, 0.0, context, attempted=asked)  # fmt: skip
    controller.update(stats, feedback)


def length(controller: LengthController) -> int:
    return controller.next(1000, 10).length


def test_adl_as_published() -> None:
    """G and A start at 0 and are halved towards the signals; k is clipped to [20, 30]."""
    adl = AdaptiveDraftLength()
    assert length(adl) == 30
    expected, g, a = [], 0.0, 0.0
    for generated, accepted in ((30, 30), (30, 30), (30, 12), (20, 20), (5, 5), (26, 26)):
        g, a = g + (generated - g) / 2, a + (accepted - a) / 2
        expected.append(int(min(max(g + (10 if a >= g else 0), 20), 30)))
        adl.step(generated, accepted)
        assert length(adl) == expected[-1]
    assert expected == [25, 30, 26, 23, 20, 20]


@pytest.mark.parametrize("alpha", [0.7, 0.9, 0.99])
def test_adl_is_a_constant_for_any_real_drafter(alpha: float) -> None:
    rng, adl, lengths = np.random.default_rng(0), AdaptiveDraftLength(), []
    for _ in range(200):
        k = length(adl)
        wrong = np.flatnonzero(rng.random(k) > alpha)
        tell(adl, k, int(wrong[0]) if wrong.size else k)
        lengths.append(length(adl))
    assert np.mean(np.array(lengths) == 20) > 0.95


@pytest.mark.parametrize(
    ("spec", "confidence", "expected"),
    [
        ("fixed(k=3)", [0.1] * 9, 3),
        ("full", [0.1] * 9, 9),
        ("adaptive", [0.9] * 30, 4),  # the first draft
        ("adaptive(k_max=3)", [0.9] * 9, 3),
    ],
)
def test_lengths_from_confidence(spec: str, confidence: list[float], expected: int) -> None:
    budget = single(spec, CONTROLLERS, LengthController).fresh().next(100, 10)
    assert budget.chain_length(np.array(confidence)) == expected


def test_adl_says_which_bound_its_largest_length_misses() -> None:
    with pytest.raises(dllm.DllmError, match="k_max must be at least 20, not 10"):
        AdaptiveDraftLength(k_max=10)


def test_no_controller_exceeds_the_room() -> None:
    for name in CONTROLLERS:
        budget = CONTROLLERS[name]().fresh().next(2, 10)
        assert budget.chain_length(np.full(30, 0.99)) <= 2


def propose(spec: str, prefix: list[int], k: int = 10) -> list[int]:
    drafting = single(spec, DRAFTERS, Drafter).open(request(prefix))
    return drafting.propose(np.array(prefix), Budget(k, k)).tokens.tolist()


def request(prefix: list[int]) -> DraftRequest:
    return DraftRequest(np.array(prefix), 100, (99,), 200)


@pytest.mark.parametrize("spec", ["prompt_lookup", "suffix(factor=4.0)"])
def test_lookups_copy_what_followed(spec: str) -> None:
    result = propose(spec, [7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9], k=4)
    assert result == [1, 2, 3, 4]
    assert propose(spec, [1, 2, 3, 4, 5]) == []


def test_prompt_lookup_prefers_longer_and_later_matches() -> None:
    prefix = [5, 1, 2, 50, 9, 1, 2, 60, 5, 1, 2]
    assert propose("prompt_lookup", prefix, k=1) == [50]  # three tokens match there
    assert propose("prompt_lookup(n=2)", prefix, k=1) == [60]


def test_a_history_gives_memory_back_once_most_of_it_is_forgotten() -> None:
    history = History()
    history.extend([*range(100)] * 120)
    history.forget(6000)
    assert (history.size, history.low) == (12_000, 6000)  # half of it
    history.forget(6001)
    assert (history.size, history.low) == (5999, 0)
    ((n, places),) = history.matches([7, 8], 9)
    assert n == 2 and history.following(places).tolist() == [9] * len(places) and len(places) > 9
    small = History()
    small.extend([1] * 5000)
    small.forget(4096)
    assert small.size == 5000


@pytest.mark.parametrize("seed", range(6))
def test_a_history_knows_where_suffixes_occurred(seed: int) -> None:
    """Every length whose places differ from those of the next, against a search of the text."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 4, rng.integers(2, 60)).tolist() for _ in range(3)]
    history = History()
    for text in texts:
        for at in range(0, len(text), 7):
            history.extend(text[at : at + 7])
        history.extend([BORDER])
    flat = [token for text in texts for token in [*text, BORDER]]
    low = len(texts[0]) + 1 if seed % 2 else 0
    history.forget(low)
    context = rng.integers(0, 4, 12).tolist()
    expected: dict[tuple[int, ...], int] = {}
    for n in range(1, 9):
        places = tuple(i for i in range(low + n, len(flat)) if flat[i - n : i] == context[-n:])
        if places:
            expected[places] = n  # the largest n of equal places
    result = {tuple(places.tolist()): n for n, places in history.matches(context, 8)}
    assert result == expected


def test_the_suffix_drafter_grows_the_most_probable_tree() -> None:
    """Behind 1 2: three times 3, once 4; behind 3 twice 5 and once 6."""
    text = [1, 2, 3, 5, 0, 1, 2, 3, 5, 0, 1, 2, 3, 6, 0, 1, 2, 4, 0, 7, 1, 2]
    part = single("suffix(depth=3, factor=3.0, least=0.2)", DRAFTERS, Drafter)
    drafting = part.open(replace(request(text), trees=True))
    draft = drafting.propose(np.array(text), Budget(3, 9))
    below = {tuple(draft.tokens[draft.path(node)].tolist()) for node in range(len(draft))}
    assert below == {(3,), (3, 5), (3, 5, 0), (4,), (3, 6), (4, 0)}  # 0.75, 0.5, 0.5, then 0.25
    for least, nodes in ((0.25, 6), (0.26, 3)):  # a share that is reached is enough
        part = single(f"suffix(depth=3, factor=3.0, least={least})", DRAFTERS, Drafter)
        opened = part.open(replace(request(text), trees=True))
        assert len(opened.propose(np.array(text), Budget(3, 9))) == nodes
    small = drafting.propose(np.array(text), Budget(3, 9, nodes=lambda alive: 2))
    assert small.tokens.tolist() == [3, 5]
    chain = part.open(request(text)).propose(np.array(text), Budget(4, 9))
    assert chain.is_chain and chain.tokens.tolist() == [3, 5, 0, 1]


@pytest.mark.parametrize("size", [2_000, 20_000])
def test_a_long_prompt_is_indexed_in_linear_time(size: int) -> None:
    """In calls of functions; a tree of substrings took twenty-four steps per token."""
    text, calls = np.random.default_rng(0).integers(0, 2_000, size).tolist(), list[str]()
    part = single("suffix", DRAFTERS, Drafter)
    sys.setprofile(lambda frame, event, _: calls.append(event))
    try:
        part.open(request(text)).propose(np.array(text), Budget(9, 9))
    finally:
        sys.setprofile(None)
    assert calls.count("call") + calls.count("c_call") < 6 * size


@pytest.mark.parametrize("name", ["prompt_lookup", "suffix"])
def test_lookups_are_as_sure_as_they_were_right(verifier: dllm.DiffusionModel, name: str) -> None:
    """Their confidence rises with accepted drafts and falls with rejected ones."""
    part: Any = single(name, DRAFTERS, Drafter)
    prefix = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    levels = []
    for accepted in (0, 1):
        part.hits = HitRates()
        for _ in range(20):
            drafting = part.open(request(prefix))
            draft = drafting.propose(np.array(prefix), Budget(4, 4))
            path = list(range(len(draft) * accepted))
            drafting.observe(Feedback(draft, path, [1]))
        draft = part.open(request(prefix)).propose(np.array(prefix), Budget(4, 4))
        assert draft.confidence is not None
        levels.append(float(draft.confidence[0]))
    assert levels[0] < 0.2 and levels[1] > 0.6


def test_the_suffix_drafter_remembers_earlier_requests() -> None:
    part = single("suffix(requests=1, factor=4.0)", DRAFTERS, Drafter)
    for answer in ([11, 12, 13, 14], [21, 22, 23, 24]):
        drafting = part.open(request([1, 2]))
        drafting.propose(np.array([1, 2, *answer]), Budget(5, 5))
        drafting.close()
    new = part.open(request([3, 21]))
    assert new.propose(np.array([3, 21]), Budget(3, 3)).tokens.tolist() == [22, 23, 24]
    assert len(part.open(request([3, 11])).propose(np.array([3, 11]), Budget(3, 3))) == 0


@pytest.mark.parametrize("before", [[], ["prompt_lookup"]], ids=["alone", "behind another"])
def test_the_suffix_drafter_remembers_whole_texts(
    verifier: dllm.DiffusionModel, before: list[str]
) -> None:
    part: Any = single("suffix", DRAFTERS, Drafter)
    result = dllm.speculate(
        verifier, [*before, part], [5, 9, 33, 5, 9], controller="fixed(k=3)", max_new_tokens=12
    )
    assert part.shared.tokens.tolist() == [*result.tokens, BORDER]


@pytest.mark.parametrize(
    ("drafter", "how", "named"),
    [
        ("prompt_lookup(m=3)", {}, "prompt_lookup"),
        ("prompt_lookup", {"rule": "ratio"}, "ratio"),
        ("prompt_lookup", {"rule": "greedy", "temperature": 1.0}, "greedy"),
        ("prompt_lookup", {"cfg_scale": 1.0}, "cfg_scale"),
        ("nano", {"search": "nothing"}, "search"),
        (
            "nano",
            {"search": "best_first_tree", "rule": "apd", "temperature": 1.0},
            "the draft is a tree",
        ),
        ("nano", {"steps": 2}, "steps"),
        ("first_of(3)", {}, "first_of"),
        ("no-such-model", {}, "no-such-model"),
    ],
)
def test_what_cannot_work_is_refused(
    verifier: dllm.DiffusionModel, drafter: str, how: dict[str, Any], named: str
) -> None:
    with pytest.raises(dllm.DllmError, match=named):
        dllm.speculate(verifier, drafter, [5, 6, 7], max_new_tokens=8, **how)


def test_every_part_is_listed_with_a_sentence() -> None:
    listed = available()
    assert {"diffusion", "cps", "adaptive", "keyed"} <= {part.name for part in listed}
    assert all(part.summary for part in listed)
    assert {part.role for part in listed} == {
        "drafter", "search", "length controller", "accept rule",
    }  # fmt: skip
