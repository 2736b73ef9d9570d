"""What every cache promises, under random commits: one property."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dllm
from dllm import cache as caches
from dllm.core.canvas import BoolArray, Canvas, IntArray
from dllm.core.capabilities import ALL_LOGITS, FORESIGHT, PROBABILITY
from dllm.core.config import GenerationConfig
from dllm.samplers import Reviser, Selector, View, Window, compose
from dllm.samplers.scorers import Random
from dllm.samplers.turn import Turn
from dllm.samplers.windows import StaticBlocks, WholeRegion

from ..decoding import Decoding
from ..settings import OWN_MODELS, SMALL
from ..table import EOS, MASK, hashed, table_model


def noise(stream: int, step: int, positions: IntArray) -> Any:
    seeds = [(stream, step, int(p)) for p in positions]
    return np.array([np.random.default_rng(seed).random() for seed in seeds], np.float32)


@dataclass(frozen=True)
class Some(Selector):
    """Commits a random number of positions."""

    name = "some"
    offers = frozenset({FORESIGHT})
    seed: int = 0

    def select(self, view: View) -> BoolArray:
        rng = np.random.default_rng((self.seed, view.canvas.step))
        chosen = np.zeros(len(view.positions), np.bool_)
        chosen[np.argsort(-view.score)[: rng.integers(1, 5)]] = True
        return chosen


@dataclass
class Taken:
    """How often decisions were taken back."""

    times: int = 0


@dataclass(frozen=True)
class TakeBack(Reviser):
    """Takes decisions back now and then."""

    name = "take_back"
    seed: int = 0

    def decide(self, turn: Turn) -> None:
        turn.commit()
        canvas, rng = turn.canvas, np.random.default_rng((self.seed, turn.canvas.step, 1))
        low, high = canvas.window
        mine = np.flatnonzero(~canvas.masked[low:high] & ~canvas.given[low:high]) + low
        taken = canvas.state(Taken)
        if taken.times > 6 or rng.random() < 0.6 or len(mine) < 2:
            return
        taken.times += 1
        turn.take_back(rng.choice(mine, 1))


@dataclass(frozen=True)
class Sliding(Window):
    """The first mask and a few positions after it."""

    name = "sliding"

    def advance(self, canvas: Canvas) -> None:
        first = int(np.flatnonzero(canvas.masked)[0])
        canvas.open_window(first, min(first + 6, canvas.end))


WINDOWS = [StaticBlocks(5), WholeRegion(), Sliding()]


@settings(max_examples=30, deadline=None)
@given(
    spec=st.sampled_from(list(SMALL.values())),
    window=st.sampled_from(WINDOWS),
    prompts=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    masks=st.integers(1, 24),
    seed=st.integers(0, 10**6),
    shift=st.sampled_from([0, 1]),
    revises=st.booleans(),
)
def test_promises(
    spec: str, window: Window, prompts: list[int], masks: int, seed: int, shift: int, revises: bool
) -> None:
    promises(spec, window, prompts, masks, seed, shift, revises)


def promises(
    spec: str, window: Window, prompts: list[int], masks: int, seed: int, shift: int, revises: bool
) -> None:
    """Reads only what was written; computes what the sampler asked for, and what changed, in the
    promised time; plans are ascending, unique and live."""
    cache = caches.compose(spec)
    parts = [window, Random(), Some(seed)]
    if revises and FORESIGHT not in cache.needs:
        parts.append(TakeBack(seed))
    sampler = compose(parts, options={"eos_policy": "none"})
    facts = OWN_MODELS.get(spec, {})
    engine = Decoding(table_model(hashed(seed), logit_shift=shift, **facts), sampler, cache,
                    GenerationConfig())  # fmt: skip
    rows = [
        Canvas.for_prompt(np.arange(n) % 20, masks, mask_id=MASK, pad_id=EOS, noise=noise)
        for n in prompts
    ]
    written = {id(canvas): np.zeros(len(canvas.tokens), np.bool_) for canvas in rows}
    changed: dict[int, set[int]] = {id(canvas): set() for canvas in rows}
    for steps in engine.run(rows):
        for step in steps:
            canvas, plan = step.canvas, step.plan
            known, compute = written[id(canvas)], plan.compute
            assert (np.diff(compute) > 0).all()
            assert compute.size
            assert compute[0] >= 0
            assert compute[-1] < canvas.length
            known[compute] = True
            read = np.arange(canvas.length) if plan.read is None else plan.read
            assert known[read].all()
            assert (np.diff(read) > 0).all()
            rows_asked = np.maximum(step.prediction.positions - shift, 0)
            assert set(rows_asked) <= set(compute)
            if cache.recompute_pending:
                assert changed[id(canvas)] <= set(compute)
                assert set(compute) <= set(read)
            if plan.refresh:
                assert len(compute) == canvas.length
            changed[id(canvas)] = {*step.decision.committed, *step.decision.remasked}
    assert all(not canvas.masked.any() for canvas in rows)


def test_needs_and_offers_are_one_mechanism() -> None:
    model = table_model(hashed(0))

    def engine(sampler: Any, cache: str) -> Decoding:
        return Decoding(model, compose(sampler), caches.compose(cache), GenerationConfig())

    with pytest.raises(dllm.ConfigError, match=r"dkv_greedy needs commits .*'threshold' does not"):
        engine("threshold", "dkv_greedy")
    engine("llada(remasking=random)", "dkv_greedy")
    engine("dream(alg=origin)", "dkv_greedy")

    @dataclass(frozen=True)
    class Whole(Some):
        name = "whole_window"
        needs = frozenset({ALL_LOGITS, PROBABILITY})

    engine(Whole(), "dual")
    with pytest.raises(
        dllm.ConfigError, match=r"needs predictions of all that is read .*'elastic' does not offer"
    ):
        engine(Whole(), "elastic")


@pytest.mark.parametrize(("sampler", "cache", "need"), [
    ("r2", "dllm_cache", "computes anew"), ("credit", "dllm_cache", "computes anew"),
])  # fmt: skip
def test_pairs_that_would_go_wrong_are_refused(sampler: str, cache: str, need: str) -> None:
    def engine(cache: str) -> Decoding:
        how = caches.compose(cache)
        return Decoding(table_model(hashed(0)), compose(sampler), how, GenerationConfig())

    with pytest.raises(dllm.ConfigError, match=f"needs .*{need}.* which cache='{cache}' does not"):
        engine(cache)
    engine("prefix")


def test_open_fields_follow_the_family() -> None:
    result = {
        (name, family): caches.compose(name, family)
        for name in ("dkv", "dkv_pd", "dllm_cache", "dual")
        for family in ("llada", "dream", "another")
    }
    every = {key: getattr(cache, "refresh_every", None) for key, cache in result.items()}
    assert [every["dkv", family] for family in ("llada", "dream", "another")] == [8, 4, 8]
    assert [every["dkv_pd", family] for family in ("llada", "dream")] == [4, 4]
    assert every["dual", "llada"] is None
    for family, wanted in {"llada": (50, 7), "dream": (25, 2)}.items():
        cache: Any = result["dllm_cache", family]
        assert (cache.prompt_every, cache.response_every) == wanted
    assert caches.compose("dkv(refresh_every=5)", "dream") == caches.compose("dkv(5)")


@pytest.mark.parametrize("spec", ["dkv(inf)", "dllm_cache(inf, inf)", "dkv_prefill(inf, inf)"])
def test_infinite_intervals_never_end(spec: str) -> None:
    cache = caches.compose(spec, "dream")
    sampler = compose([StaticBlocks(4), Random(), Some(1)], options={"eos_policy": "none"})
    row = Canvas.for_prompt(np.arange(4), 30, mask_id=MASK, pad_id=EOS, noise=noise)
    engine = Decoding(table_model(hashed(1)), sampler, cache, GenerationConfig())
    plans = [step.plan for steps in engine.run([row]) for step in steps]
    assert [plan.refresh for plan in plans] == [True] + [False] * (len(plans) - 1)
    assert len(plans) > 9


def test_a_canvas_that_was_cut_is_planned_to_its_new_end() -> None:
    """First-commit end of text shortens the canvas in the middle of everything."""
    for name, spec in SMALL.items():
        facts = OWN_MODELS.get(name, {})
        sampler = compose([StaticBlocks(6), Random(), Some(3)], stop_ids=(EOS,),
                          options={"eos_policy": "first_commit_cut"})  # fmt: skip
        model = table_model(lambda ids, at: np.eye(32)[np.where(at == 20, EOS, 5)] * 9.0, **facts)
        rows = [Canvas.for_prompt(np.arange(4), 30, mask_id=MASK, pad_id=EOS, noise=noise)]
        for steps in Decoding(model, sampler, caches.compose(spec), GenerationConfig()).run(rows):
            assert all(step.plan.compute[-1] < 34 for step in steps)
        assert rows[0].length == 21
        assert rows[0].finish_reason == "stop"


@pytest.mark.parametrize("spec", ["dual(refresh_every=0)", "dkv(both=1)",
                                  "window_diffusion(active=9, window=3)", "elastic(gamma=x)",
                                  "dllm_cache(ratio=2)", "elastic(beta=0)", "dcd(delay=-1)",
                                  "dkv_greedy(center=x)", "dcd(mode=x)"])  # fmt: skip
def test_wrong_settings_are_refused(spec: str) -> None:
    with pytest.raises(dllm.DllmError):
        caches.compose(spec)


def test_a_window_of_no_positions_is_refused_as_that() -> None:
    with pytest.raises(dllm.ConfigError, match=r"^window must be at least 1, not 0$"):
        caches.compose("window_diffusion(window=0)")


def test_settings_are_frozen() -> None:
    assert replace(caches.compose("dkv"), refresh_every=3) == caches.compose("dkv(3)")


@dataclass(frozen=True)
class Wrong(caches.Cache):
    """Returns what is no plan."""

    name = "wrong"
    given: Any = None

    def plan(self, canvas: Canvas, slots: caches.Slots, targets: IntArray) -> Any:
        return self.given


@dataclass(frozen=True)
class Nowhere(Window):
    """Opens nothing."""

    name = "nowhere"

    def advance(self, canvas: Canvas) -> None:
        canvas.open_window(canvas.start, canvas.start)


def test_what_a_plan_and_a_window_must_hold(tiny: dllm.DiffusionModel) -> None:
    for given_ in (None, [0, 1], caches.Plan(np.ones(5, np.bool_)), caches.Plan([0, 1])):  # type: ignore[arg-type]
        with pytest.raises(dllm.ConfigError, match=r"wrong\.plan returned no Plan of positions"):
            dllm.generate(tiny, [5, 6], cache=Wrong(given_), max_new_tokens=3)
    with pytest.raises(dllm.ConfigError, match=r"nowhere\.advance left nothing undecided"):
        dllm.generate(tiny, [5, 6], sampler=Nowhere(), max_new_tokens=3)  # it was fed for ever
