"""What fails, fails alone: faults at random moments, and rows beside them that are what they are.

A forward raises at its start or in some layer, out of memory or otherwise; a token's embedding is
NaN; a tokenizer refuses some texts; an observer raises.  Whoever is healthy gets what it gets
alone, the others get an error of their own, and the session goes on.
"""

import copy
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import dllm
from dllm.core.errors import ConfigError, NumericError, OutOfMemoryError
from dllm.runtime.handle import Handle

from ..drafting.conftest import make_verifier
from . import decoding
from .seeds import case_of

SICK, REFUSED = 7, 9  # a token whose embedding is NaN, one whose texts the tokenizer refuses
LOOK = 5.0  # seconds between two looks whether a session still works
STILL, IDLE = 12, 0.02  # looks in a row, and seconds of processor time: then it hangs
MOST = 120.0  # seconds of processor time that nothing here may take
DRAFTERS = (None, "prompt_lookup(k=3, n=2)", "suffix", "cacheback")


class InjectedError(RuntimeError):
    """A fault that no part of the library raises."""


class SpeechlessError(InjectedError):
    """One that fails to say what it is."""

    def __str__(self) -> str:
        raise InjectedError


def refusing(tokenizer: Any) -> Any:
    """The tokenizer, which cannot decode one of its tokens."""
    result = copy.deepcopy(tokenizer)

    def decode(ids: Any, **how: Any) -> str:
        if REFUSED in list(ids):
            raise InjectedError("this tokenizer does not know that token")
        return str(tokenizer.decode(ids, **how))

    result.decode = decode
    return result


@dataclass(frozen=True)
class Case:
    seed: int
    prompts: list[list[int]]
    session: dict[str, Any]
    how: dict[str, Any]
    faults: dict[int, type[Exception]] = field(default_factory=dict)  # by the number of a forward
    observed: int | None = None  # the report at which the observer raises

    def where(self, model: dllm.DiffusionModel) -> torch.nn.Module:
        """The module that raises: the whole network in half of the cases."""
        rng = random.Random(f"{self.seed}/module")
        return model.backbone if rng.random() < 0.5 else rng.choice([*model.backbone.modules()])


@pytest.fixture(scope="module")
def sick(tiny: dllm.DiffusionModel) -> dllm.DiffusionModel:
    return sickened(tiny)


@pytest.fixture(scope="module")
def sick_verifier() -> dllm.DiffusionModel:
    return sickened(make_verifier("gqa"))


def sickened(model: dllm.DiffusionModel) -> dllm.DiffusionModel:
    """The model with one NaN embedding, and a tokenizer that refuses a token."""
    hf: Any = copy.deepcopy(model.hf)
    inputs = hf.get_input_embeddings()
    if inputs.weight is hf.get_output_embeddings().weight:
        hf.get_output_embeddings().weight = torch.nn.Parameter(inputs.weight.detach().clone())
    with torch.no_grad():
        inputs.weight[SICK] = torch.nan
        hf.get_output_embeddings().weight[[SICK, REFUSED]] = 0.0
    tokenizer = None if model.tokenizer is None else refusing(model.tokenizer)
    return replace(model, hf=hf, tokenizer=tokenizer)


def faults_of(rng: random.Random) -> dict[int, type[Exception]]:
    kinds = (MemoryError, InjectedError, torch.OutOfMemoryError, SpeechlessError)
    return {rng.randint(1, 12): rng.choice(kinds) for _ in range(rng.choice([0, 1, 1, 2, 4]))}


def case(seed: int, model: dllm.DiffusionModel) -> Case:
    rng = random.Random(f"faults {seed}")
    base = decoding.case(seed, model)
    how = {k: v for k, v in base.how.items() if k not in ("max_batch_tokens", "cache")}
    if rng.random() < 0.2:
        how["regex"] = rng.choice(["[a-z ]+", "(ab|ba)*"])
        for name in (*("top_p", "top_k", "min_new_tokens", "stop_strings"), "initial_text",
                     "remask", "constraints", "length"):  # fmt: skip
            how.pop(name, None)
    session = {
        "cache": base.how["cache"], "max_batch_size": rng.choice([1, 2, 3, 8]),
        "max_batch_tokens": rng.choice([None, 1, 30, 60, 200]),
        "max_positions": rng.choice([None, None, 200]),
    }  # fmt: skip
    return Case(seed, spoilt(base.prompts, rng), session, how, faults_of(rng),
                rng.choice([None, None, None, 2]))  # fmt: skip


def drafted(seed: int) -> Case:
    rng = random.Random(f"drafted faults {seed}")
    prompts = []
    for _ in range(rng.randint(2, 5)):
        ids = [rng.randrange(10, 400) for _ in range(rng.randint(2, 14))]
        prompts.append(ids * rng.randint(1, 6))
    session = {
        "drafter": rng.choice(DRAFTERS), "controller": rng.choice(["fixed(k=3)", None]),
        "max_batch_size": rng.choice([1, 2, 3, 8]),
        "prefix_cache_tokens": rng.choice([None, 0, 64]),
        "max_batch_tokens": rng.choice([None, 1, 30]),
    }  # fmt: skip
    how = {"max_new_tokens": rng.randint(1, 16), "temperature": rng.choice([0.0, 1.0]),
           "seed": rng.randrange(2**40)}  # fmt: skip
    return Case(seed, spoilt(prompts, rng), session, how, faults_of(rng))


def spoilt(prompts: list[list[int]], rng: random.Random) -> list[list[int]]:
    """The prompts, free of the two tokens, which some of them then get."""
    prompts = [[10 if token in (SICK, REFUSED) else token for token in ids] for ids in prompts]
    for token in (SICK, REFUSED):
        if rng.random() < 0.4:
            rng.choice(prompts).append(token)
    return prompts


@contextmanager
def failing(module: torch.nn.Module, faults: dict[int, type[Exception]]) -> Iterator[list[int]]:
    """Calls of a module raise where the case says so; how often they did."""
    calls, raised = [0], list[int]()

    def hook(*_: Any) -> None:
        calls[0] += 1
        if calls[0] in faults:
            raised.append(calls[0])
            raise faults[calls[0]]("injected")

    handle = module.register_forward_pre_hook(hook)
    try:
        yield raised
    finally:
        handle.remove()


def tokens_of(handle: Handle) -> list[int]:
    """The answer of a session that works, however little of a busy machine it gets.  One that does
    nothing, or works without an end, fails the test."""
    began = before = time.process_time()
    still = 0
    while still < STILL and before - began < MOST:
        with suppress(TimeoutError):
            return handle.result(LOOK).tokens
        now = time.process_time()
        still = still + 1 if now - before < IDLE else 0
        before = now
    raise AssertionError(f"the session hangs after {before - began:.1f} s of processor time")


def check(model: dllm.DiffusionModel, one: Case) -> None:
    """Every healthy row is what it is alone; as many rows as faults may fail of them."""
    alone: list[Any] = []
    try:
        with dllm.Session(model, **one.session) as session:
            for i, prompt in enumerate(one.prompts):
                how = one.how | {"repetition": one.prompts[:i].count(prompt)}
                try:
                    alone.append(tokens_of(session.submit(prompt, **how)))
                except (NumericError, InjectedError) as error:
                    alone.append(error)
    except ConfigError:  # a combination that is refused
        return
    reports = [0]

    def observe(_: Any) -> None:
        reports[0] += 1
        if reports[0] == one.observed:
            raise InjectedError("an observer gave up")

    with failing(one.where(model), one.faults) as raised, dllm.Session(
        model, observe=observe if one.observed else None, **one.session
    ) as session:  # fmt: skip
        handles = [
            session.submit(prompt, **one.how, repetition=one.prompts[:i].count(prompt))
            for i, prompt in enumerate(one.prompts)
        ]
        failed = 0
        for handle, expected in zip(handles, alone, strict=True):
            try:
                found: Any = tokens_of(handle)
            except (NumericError, OutOfMemoryError, InjectedError) as error:
                found = error
            if isinstance(expected, Exception):
                assert isinstance(found, Exception)
            elif isinstance(found, Exception):
                assert not isinstance(found, NumericError), found
                failed += 1  # it was alone in a forward that raised
            else:
                assert found == expected
        assert failed <= len(raised), "a fault fails one row at most"
        assert session.failure is None and session.running == session.waiting == 0
        assert session._scheduler.engine.used == 0 and not session._scheduler.engine.live


@pytest.mark.filterwarnings("ignore:observe raised")
@pytest.mark.fuzz(10)
def test_rows_of_a_canvas(sick: dllm.DiffusionModel, seeds: range) -> None:
    for seed in seeds:
        one = case(seed, sick)
        with case_of(seed, one):
            check(sick, one)


@pytest.mark.filterwarnings("ignore:observe raised")
@pytest.mark.fuzz(3)
def test_rows_of_random_tokens(noisy: dllm.DiffusionModel, seeds: range) -> None:
    model = replace(noisy, tokenizer=refusing(noisy.tokenizer))  # a NaN would be drawn as noise
    for seed in seeds:
        one = case(seed, model)
        with case_of(seed, one):
            check(model, one)


@pytest.mark.fuzz(4)
def test_verified_texts(sick_verifier: dllm.DiffusionModel, seeds: range) -> None:
    for seed in seeds:
        one = drafted(seed)
        with case_of(seed, one):
            check(sick_verifier, one)
