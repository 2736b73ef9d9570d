"""Random speculation: the text is the verifier's own, whoever drafts, and whatever is beside it."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

import dllm

from ..drafting.conftest import ARCHITECTURES, Scripted, make_verifier
from .seeds import case_of

LOOKUPS = ("prompt_lookup(k=3, n=2)", "prompt_lookup", "suffix", "suffix(tree=False)",
           "cacheback", "first_of(prompt_lookup+cacheback)", None)  # fmt: skip
CONTROLLERS = ("fixed(k=1)", "fixed(k=6)", "full", "adl", "adaptive")
SEARCHES = (None, "argmax", "cps")
LOSSLESS = ("ratio", "block")  # in distribution
Outcome = tuple[list[int], str, str]


@dataclass(frozen=True)
class Case:
    """What to write and how; `drafter` makes a fresh drafter, because some learn from a text."""

    kind: str
    prompts: list[list[int]]
    drafting: Any
    how: dict[str, Any] = field(default_factory=dict)
    mine: dict[str, Any] = field(default_factory=dict)  # of the drafts alone
    streamed: bool = False


def case(seed: int) -> Case:
    """The case of a seed.  Some are combinations that are refused."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        ids = [rng.randrange(5, 400) for _ in range(rng.randint(1, 14))]
        prompts.append(ids + ids[: rng.randint(0, 10)])
    if rng.random() < 0.3:
        prompts[-1] = prompts[0]
    how: dict[str, Any] = {
        "max_new_tokens": rng.randint(1, 16), "max_batch_size": rng.choice([1, 2, 8]),
        "seed": rng.randrange(2**40),
    }  # fmt: skip
    if rng.random() < 0.5:
        how["temperature"] = rng.choice([0.3, 0.8, 1.5])
        if rng.random() < 0.5:
            how |= {"top_p": rng.choice([0.5, 0.95]), "top_k": rng.choice([0, 3, 40])}
    often: list[tuple[float, str, Any]] = [
        (0.2, "repetition_penalty", rng.choice([0.8, 1.3])),
        (0.2, "min_new_tokens", rng.randint(0, how["max_new_tokens"])),
        (0.2, "stop_strings", tuple(rng.sample(["a", "Tom", " ", "e", "1"], 2))),
    ]
    how |= {name: value for chance, name, value in often if rng.random() < chance}
    mine: dict[str, Any] = {"controller": rng.choice(CONTROLLERS)}
    if rng.random() < 0.15:
        mine["rule"] = rng.choice(LOSSLESS)
    drafting: Any = rng.choice(LOOKUPS)
    if rng.random() < 0.25:
        drafting = ("scripted", rng.choice([0.0, 0.3, 0.8]), rng.random() < 0.5, seed)
    elif rng.random() < 0.25:
        drafting = "tiny"
        mine["window"] = rng.randint(2, 8)
        search = rng.choice(SEARCHES)
        mine |= {} if search is None else {"search": search}
    return Case(rng.choice(ARCHITECTURES), prompts, drafting, how, mine, seed % 5 == 0)


def outcome(result: dllm.SpeculativeResult) -> Outcome:
    return result.tokens, result.text, result.finish_reason


def check(case: Case, verifier: dllm.DiffusionModel, tiny: dllm.DiffusionModel) -> bool:
    """Whether the case was written; False where it is refused in a sentence."""
    plain = dllm.speculate(verifier, None, case.prompts, **case.how)
    drafter = case.drafting
    if drafter == "tiny":
        drafter = tiny
    elif isinstance(drafter, tuple):
        _, noise, tree, seed = drafter
        tree = tree and case.kind == "full"  # others take chains
        drafter = Scripted([*case.prompts[0], *plain[0].tokens], 5, noise, tree, seed)
    try:
        drafted = dllm.speculate(verifier, drafter, case.prompts, **case.how, **case.mine)
    except dllm.DllmError as error:
        assert len(str(error)) < 500 and "\n" not in str(error)
        return False
    for result in drafted:
        consistent(result, case.how["max_new_tokens"])
    if "rule" not in case.mine:  # the verifier's own tokens, not only its distribution
        assert [outcome(result) for result in drafted] == [outcome(result) for result in plain]
    if case.streamed:
        pieces = [""] * len(case.prompts)
        for event in dllm.stream_speculate(verifier, None, case.prompts, **case.how):
            pieces[event.row] += event.text
        assert pieces == [result.text for result in plain]
    return True


def consistent(result: dllm.SpeculativeResult, limit: int) -> None:
    """What a result counts adds up."""
    assert 1 <= len(result.tokens) <= limit
    assert len(result.order) == len(result.logprobs) == len(result.tokens)
    assert sum(r.emitted for r in result.rounds) == len(result.tokens)
    assert result.nfe == len(result.rounds) and result.order == sorted(result.order)
    assert all(r.accepted <= min(r.drafted, r.depth) for r in result.rounds)
    assert all(r.emitted - r.accepted in (0, 1) for r in result.rounds)


@pytest.fixture(scope="module")
def models() -> dict[str, dllm.DiffusionModel]:
    return {kind: make_verifier(kind) for kind in ARCHITECTURES}


@pytest.mark.fuzz(10)
def test_the_text_is_the_verifiers(
    tiny: dllm.DiffusionModel, models: dict[str, dllm.DiffusionModel], seeds: range
) -> None:
    taken = 0
    for seed in seeds:
        one = case(seed)
        with case_of(seed, one):
            taken += check(one, models[one.kind], tiny)
    assert taken >= len(seeds) / 3
