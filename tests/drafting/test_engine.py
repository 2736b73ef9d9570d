"""Speculation at work: its rounds wherever it runs, rows that fail, and alone = together."""

import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.drafting.accept.chains import Greedy
from dllm.drafting.base import Budget, Draft, Drafter, Drafting, DraftRequest, Feedback
from dllm.drafting.length.adaptive import Adaptive
from dllm.drafting.length.control import LengthController
from dllm.drafting.length.lengths import Fixed
from dllm.drafting.verifiers.packed import PackedVerifier

from ..serve.conftest import serve
from ..thin import some
from .conftest import Scripted, make_verifier, prompts
from .test_batch import said

NEW = 16
BAD = [7, 7, 7]  # the prompt whose row fails


# -- rounds in a session are those of the library ------------------------------------------------


@dataclass
class Recorded(LengthController):
    """Drafts as many tokens as the last round's costs say: a controller that looks at them all."""

    def __post_init__(self) -> None:
        self.seen: list[Any] = []
        self.length = 3

    def fresh(self) -> LengthController:
        return self  # every text reports to it

    def next(self, room: int, context: int) -> Budget:
        assert room > 0, "where nothing can be drafted nobody is asked"
        return Budget(min(self.length, room), room)

    def update(self, stats: Any, feedback: Feedback) -> None:
        self.seen.append(stats)
        self.length = 1 + (stats.beside + stats.beside_emitted) % 5


class Clock:
    """Seconds that pass whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def from_library(verifier: Any, several: list[list[int]], drafter: Any) -> list[Any]:
    results: list[Any] = dllm.speculate(
        verifier, drafter, several, max_new_tokens=NEW, controller=Recorded()
    )
    return results


def from_session(verifier: Any, several: list[list[int]], drafter: Any) -> list[Any]:
    how: dict[str, Any] = {"max_new_tokens": NEW, "controller": Recorded()}
    with dllm.Session(verifier, drafter=drafter) as session:
        with session._wake:  # none of them may begin before all are there
            handles = [session.submit(prompt, **how) for prompt in several]
        return [handle.result(60) for handle in handles]


def test_a_session_tells_controllers_what_the_library_does(
    verifier: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds, drafted lengths and costs, on a clock of their own."""
    several, found = prompts(3, seed=5), []
    for way in (from_library, from_session):
        monkeypatch.setattr(time, "process_time", Clock())
        found.append(way(verifier, several, Scripted(None)))
        monkeypatch.undo()
    for a, b in zip(*found, strict=True):
        assert a.tokens == b.tokens
        assert a.rounds == b.rounds, "with every second and every token beside"
        assert all(r.attempted and r.draft_seconds > 0 for r in a.rounds if r.drafted)
    assert any(r.beside for result in found[1] for r in result.rounds)


class Sleeping(Drafter):
    """Drafts after a while in which the processor does something else."""

    def open(self, request: DraftRequest) -> Drafting:
        return Waking()


class Waking(Drafting):
    def propose(self, prefix: Any, budget: Budget) -> Draft:
        time.sleep(0.2)
        return Draft(np.zeros(2, np.int64))


def test_on_a_processor_only_its_own_time_counts(verifier: dllm.DiffusionModel) -> None:
    result = dllm.speculate(verifier, Sleeping(), prompts(1)[0], max_new_tokens=4)
    drafted = [r for r in result.rounds if r.attempted]
    assert drafted and all(r.draft_seconds < 0.15 for r in drafted)


def test_the_served_default_controller_sees_costs(
    verifier: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``adaptive`` is fed the drafter's time and the tokens beside, in the server too."""
    begun: list[Adaptive] = []
    fresh = Adaptive.fresh
    monkeypatch.setattr(Adaptive, "fresh", lambda self: begun.append(self) or fresh(self))
    served = serve(verifier, drafters=("prompt_lookup",), name="ar", max_batch_size=4)
    body = {"prompt": [5, 6, 7, 5, 6, 7, 5], "max_tokens": NEW, "n": 3}
    assert served.post("/v1/completions", body).status_code == 200
    assert len(begun) == 3 and len({id(one) for one in begun}) == 1  # texts share it
    assert begun[0].learned.drafting > 0
    assert max(max(costs.known) for costs in begun[0].learned.costs.values()) > 2
    served.stop()


# -- a row that raises ---------------------------------------------------------------------------


def fault() -> None:
    raise ZeroDivisionError("a part gave up")


def bad(tokens: Any) -> bool:
    return list(tokens[:3]) == BAD


@dataclass
class BadDrafter(Scripted):
    """Raises from the third round of the bad text on; ``where`` it does."""

    where: str = "propose"

    def open(self, request: DraftRequest) -> Drafting:
        if bad(request.prompt) and self.where == "open":
            fault()
        drafting = super().open(request)
        return _Raising(drafting, self.where) if bad(request.prompt) else drafting


class _Raising(Drafting):
    def __init__(self, inner: Drafting, where: str) -> None:
        self.inner, self.where, self.rounds = inner, where, 0

    def propose(self, prefix: np.ndarray, budget: Budget) -> Draft:
        self.rounds += 1
        if self.where == "propose" and self.rounds >= 3:
            fault()
        return self.inner.propose(prefix, budget)

    def observe(self, feedback: Feedback) -> None:
        if self.where == "observe" and self.rounds >= 3:
            fault()

    def close(self) -> None:
        if self.where == "close":
            fault()


@dataclass
class BadRule(Greedy):
    name = "greedy"

    def judge(self, rows: Any, draft: Draft) -> Any:
        if bad(rows.prefix) and rows.round == 2:
            fault()
        return super().judge(rows, draft)


@dataclass
class BadController(Fixed):
    """Raises in the text whose context is that of the bad one; ``where`` it does."""

    where: str = "next"
    k: int = 4

    def next(self, room: int, context: int) -> Budget:
        if self.where == "next" and context == len(BAD):
            fault()
        return super().next(room, context)

    def update(self, stats: Any, feedback: Feedback) -> None:
        if self.where == "update" and stats.context == len(BAD):
            fault()


FAULTS = ["open", "propose", "observe", "close", "verifier", "rule", "next", "update"]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a call takes so that the bad text fails at a place."""

    def at(where: str) -> tuple[Drafter, dict[str, Any]]:
        how: dict[str, Any] = {"controller": Fixed(4)}
        if where in ("next", "update"):
            how["controller"] = BadController(where=where)
        if where == "rule":
            how["rule"] = BadRule()
        if where == "verifier":
            score = PackedVerifier.score

            def failing(self: PackedVerifier, work: Any) -> Any:
                if any(bad(text.tokens) and len(text.tokens) > 4 for text, _ in work):
                    fault()
                return score(self, work)

            monkeypatch.setattr(PackedVerifier, "score", failing)
        drafts = where in ("open", "propose", "observe", "close")
        return BadDrafter(None, where=where) if drafts else Scripted(None), how

    return at


@pytest.mark.parametrize("where", some(FAULTS, 1))
def test_a_row_that_raises_spares_the_others(
    verifier: dllm.DiffusionModel, faulty: Any, where: str
) -> None:
    """In the engine, in a session and in the library, whose first error is raised."""
    several = [[5, 6, 8, 9], BAD, [9, 8, 7, 6], [4, 4, 4, 4, 4]]
    expected = [dllm.speculate(verifier, None, one, max_new_tokens=NEW).tokens for one in several]
    drafter, how = faulty(where)
    with dllm.Session(verifier, drafter=drafter, max_batch_size=3) as session:
        handles = [session.submit(one, max_new_tokens=NEW, **how) for one in several]
        for handle, tokens, prompt in zip(handles, expected, several, strict=True):
            if prompt == BAD:
                with pytest.raises(ZeroDivisionError, match="a part gave up"):
                    handle.result(60)
            else:
                assert handle.result(60).tokens == tokens
        assert session.failure is None
        assert (
            session.submit(several[0], max_new_tokens=NEW, **how).result(60).tokens == expected[0]
        )
    assert (session.running, session.positions_used) == (0, 0)
    with pytest.raises(ZeroDivisionError, match="a part gave up"):
        dllm.speculate(verifier, drafter, several, max_new_tokens=NEW, **how)
    assert dllm.speculate(verifier, drafter, several[0], max_new_tokens=NEW, **how).tokens


def test_memory_that_runs_out_gives_room_back(
    verifier: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two texts at a time fit: the others begin again later, and nothing of it shows."""
    several = prompts(5, seed=2)
    how: dict[str, Any] = {"max_new_tokens": NEW, "controller": "fixed(k=3)"}
    expected = [dllm.speculate(verifier, "prompt_lookup", one, **how) for one in several]
    score, most = PackedVerifier.score, [2]

    def tight(self: PackedVerifier, work: Any) -> Any:
        if len(work) > most[0]:
            raise torch.OutOfMemoryError("forced")
        return score(self, work)

    monkeypatch.setattr(PackedVerifier, "score", tight)
    results = dllm.speculate(verifier, "prompt_lookup", several, **how)
    assert list(map(said, results)) == list(map(said, expected))
    assert sum(result.restarts for result in results) >= 3
    most[0] = 0
    with pytest.raises(dllm.OutOfMemoryError, match="max_batch_tokens"):
        dllm.speculate(verifier, "prompt_lookup", several, **how)


# -- alone = together ----------------------------------------------------------------------------


def everything(result: Any) -> tuple[Any, ...]:
    """All that does not measure time or count the others, bits of log-probabilities aside."""
    return (*said(result), result.order, result.rule)


@pytest.mark.parametrize("seed", some([0, 1, 2], 1))
def test_joins_cancels_and_threads_change_nothing(
    verifiers: dict[str, dllm.DiffusionModel], seed: int
) -> None:
    """Texts that come and go at random, from several threads, each with its own settings."""
    rng = np.random.default_rng(seed)
    model = verifiers[("full", "full", "gqa")[seed]]
    several = prompts(6, seed=seed)
    drafters: list[Any] = [None, "prompt_lookup", "prompt_lookup(n=2, k=4)"]
    settings = [
        {
            "max_new_tokens": int(rng.integers(2, NEW)), "temperature": float(i % 2), "seed": i,
            "controller": ("fixed(k=4)", "adl", "full")[i % 3],
            **({"repetition_penalty": 1.2} if i % 5 == 0 else {}),
        }
        for i in range(12)
    ]  # fmt: skip
    jobs = [(int(rng.integers(6)), int(rng.integers(12)), int(rng.integers(3))) for _ in range(18)]
    alone = {
        job: everything(
            dllm.speculate(model, drafters[job[2]], several[job[0]], **settings[job[1]])
        )
        for job in set(jobs)
    }
    wrong: list[Any] = []
    with dllm.Session(model, max_batch_size=3, prefix_cache_tokens=0) as session:

        def work(mine: list[tuple[int, int, int]], cancels: Any) -> None:
            for job, cancelled in zip(mine, cancels, strict=True):
                text, how, drafter = job
                handle = session.submit(several[text], drafter=drafters[drafter], **settings[how])
                if cancelled:
                    next(iter(handle), None)
                    handle.cancel()
                elif everything(handle.result(60)) != alone[job]:
                    wrong.append(job)

        threads = [
            threading.Thread(target=work, args=(jobs[i::3], rng.random(6) < 0.3)) for i in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert (session.running, session.waiting, session.positions_used) == (0, 0, 0)


# -- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numbers_that_are_broken_are_an_error(temperature: float) -> None:
    """Of the weights, or by a processor that bans everything: with drafts and without, by rules
    that emit what they compared and by one that draws."""
    model = make_verifier("full")
    how: dict[str, Any] = {"max_new_tokens": 6, "temperature": temperature}

    def nothing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - torch.inf if ids.shape[1] > 5 else scores

    ways: list[Any] = [(None, {}), ("prompt_lookup", {}), (None, {"rule": "ratio"})]
    for drafter, rule in ways:
        with pytest.raises(dllm.NumericError, match="bans every token"):
            dllm.speculate(model, drafter, [4, 4, 4, 4], logits_processor=[nothing], **how, **rule)
    with torch.no_grad():
        model.hf.get_output_embeddings().weight[7] = torch.nan
    for drafter, rule in ways:
        with pytest.raises(dllm.NumericError, match="NaN"):
            dllm.speculate(model, drafter, [4, 4, 4, 4], **how, **rule)


def test_what_belongs_elsewhere_is_said(verifier: dllm.DiffusionModel) -> None:
    for given, error in ((lambda ids, scores: None, "not None"),
                         (lambda ids, scores: scores[:, :5], "not torch.Size")):  # fmt: skip
        with pytest.raises(dllm.ConfigError, match=error):
            dllm.speculate(verifier, None, [4, 5], logits_processor=[given], max_new_tokens=2)
    with pytest.raises(dllm.ConfigError, match="ngram_candidates is for block drafters"):
        dllm.speculate("nano-ar", "nano", "Sort this list: Zoe, Ben", ngram_candidates=False)
    with pytest.raises(dllm.ConfigError, match="cannot keep to a structure: drop it or regex"):
        dllm.speculate(verifier, "prompt_lookup", [4, 5], rule="apd", regex="[0-9]+")
    with dllm.Session(verifier, drafter="prompt_lookup") as session:
        for name, owner in (("search", "drafter"), ("exact", "session")):
            with pytest.raises(dllm.ConfigError, match=f"{name} belongs to the {owner}"):
                session.submit([4, 5], **{name: "cps"})
        for deadline in ("soon", float("nan")):  # would end the session for everybody
            with pytest.raises(dllm.ConfigError, match="number of seconds"):
                session.submit([4, 5], deadline=deadline)  # type: ignore[arg-type]
        assert session.submit([4, 5], max_new_tokens=2).result(60).tokens


def test_numbers_that_are_not_finite_stay_in_their_text() -> None:
    """Also in slots that another text gets, or reads beyond its own keys."""
    model = make_verifier("gqa")
    healthy = [[20 + i, 6, 7, 8, 9] * n for i, n in enumerate((2, 4, 3))]
    expected = dllm.speculate(model, None, healthy, max_new_tokens=NEW)
    hf: Any = model.hf
    with torch.no_grad():
        hf.get_input_embeddings().weight[5] = torch.nan
    with dllm.Session(model, max_batch_size=2) as session:
        sick = session.submit([10, 5, 11] * 9, max_new_tokens=NEW)
        others = [session.submit(prompt, max_new_tokens=NEW) for prompt in healthy]
        with pytest.raises(dllm.NumericError):
            sick.result(60)
        assert [one.result(60).tokens for one in others] == [r.tokens for r in expected]


@pytest.mark.parametrize("given", [[], [None], None])
def test_drafts_that_are_missing_fail_their_own_text(
    verifier: dllm.DiffusionModel, given: list[Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Scripted()

    def propose_all(work: Any) -> Any:
        return given if given is not None else sys.exit("a draft for each text")

    monkeypatch.setattr(drafter, "propose_all", propose_all)
    how: dict[str, Any] = {"max_new_tokens": 4}
    expected = dllm.speculate(verifier, None, [4, 5], **how).tokens
    with dllm.Session(verifier) as session:
        one, other = session.submit([4, 5], drafter=drafter, **how), session.submit([4, 5], **how)
        with pytest.raises((dllm.ConfigError, RuntimeError), match="a draft for each text"):
            one.result(60)
        assert other.result(60).tokens == expected
        assert session.submit([4, 5], **how).result(60).tokens == expected


def test_a_drafting_without_propose_says_so() -> None:
    drafting = Drafting()
    drafting.part = Drafter()
    with pytest.raises(NotImplementedError):
        drafting.propose(np.arange(3), Budget(2, 9))
