"""The properties notice faults: broken on purpose, caches fail the tests that hold for them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

import dllm
from dllm import cache as caches
from dllm.cache import Cache, Plan, Slots
from dllm.cache.dllm_cache import DLLMCache, Phases
from dllm.cache.refresh import Clock, Refreshing
from dllm.cache.sparse import SparseCache
from dllm.engine import turn as engine

from ..settings import EXACT, OWN_MODELS, SMALL
from ..thin import some
from .test_every_pair import check_exact as identity
from .test_every_pair import run
from .test_layerwise import layer_promises
from .test_protocol import WINDOWS, promises

Patch = pytest.MonkeyPatch
FAULTS = (AssertionError, dllm.ConfigError)


def noticed(spec: str, shift: int, tries: int = 20) -> bool:
    """Whether one of some random runs breaks a promise."""
    for seed in range(tries):
        window = WINDOWS[seed % len(WINDOWS)]
        try:
            promises(spec, window, [1 + seed % 5, 7], 8 + seed % 16, seed, shift, True)
        except FAULTS:
            return True
    return False


def forgets_changes(patch: Patch, cls: type[Cache]) -> None:
    patch.setattr(Slots, "changed", lambda *_: None)


def forgets_what_is_taken_back(patch: Patch, cls: type[Cache]) -> None:
    changed, calls = Slots.changed, count()  # called with commits, then with what is remasked

    def first_of_two(self: Slots, positions: Any) -> None:
        if next(calls) % 2 == 0:
            changed(self, positions)

    patch.setattr(Slots, "changed", first_of_two)


def closes(patch: Patch, **changed: Callable[[Any], Any]) -> None:
    """The engine closes plans with some of its arguments changed."""
    complete_plan, names = engine.complete_plan, ("plan", "targets", "slots", "pending")

    def faulty(*given: Any) -> Plan:
        return complete_plan(
            *(changed.get(n, lambda x: x)(x) for n, x in zip(names, given, strict=True))
        )

    patch.setattr(engine, "complete_plan", faulty)


def forgets_pending(patch: Patch, cls: type[Cache]) -> None:
    closes(patch, pending=lambda pending: pending[:0])


def forgets_targets(patch: Patch, cls: type[Cache]) -> None:
    closes(patch, targets=lambda targets: targets[:0])


def forgets_the_shift(patch: Patch, cls: type[Cache]) -> None:
    closes(patch, slots=lambda slots: replace(slots, shift=0))


def plans(patch: Patch, cls: type[Cache], change: Callable[[Plan, int], Plan]) -> None:
    plan: Any = cls.plan
    patch.setattr(cls, "plan", lambda self, c, s, t: change(plan(self, c, s, t), c.length))


def skips_a_position(patch: Patch, cls: type[Cache]) -> None:
    plans(patch, cls, lambda p, _: replace(p, compute=p.compute[1:]) if p.refresh else p)


def starts_without_the_last(patch: Patch, cls: type[Cache]) -> None:
    plans(patch, cls, lambda p, n: replace(p, compute=p.compute[p.compute < n - 2], refresh=False))


def reads_one_less(patch: Patch, cls: type[Cache]) -> None:
    def less(plan: Plan, length: int) -> Plan:
        read = np.arange(length) if plan.read is None else plan.read
        return replace(plan, read=np.setdiff1d(read, plan.compute[-1:]))

    plans(patch, cls, less)


# Which fault in which caches: margins around the window, as of dsb, make some of them harmless.
ALL = [name for name in SMALL if name != "none" and "," not in name]
WRITE_ALL = [name for name in ALL if name not in (*OWN_MODELS, "d2f")]
MUTANTS: list[tuple[Any, list[str], tuple[int, ...]]] = [
    (forgets_changes, ["dkv", "dkv_pd", "elastic", "window_diffusion"], (0, 1)),
    (forgets_what_is_taken_back, ["elastic"], (0, 1)),
    (forgets_pending, ["dkv", "dkv_pd", "elastic"], (0, 1)),
    (forgets_targets, ["dkv_greedy", "dual", "sparse"], (1,)),
    (forgets_the_shift, ["dkv", "dual", "sparse", "prefix"], (1,)),
    # those without the rest of the canvas have no plan that recomputes all of it
    (skips_a_position, [n for n in WRITE_ALL if n != "dpad"], (0, 1)),
    (starts_without_the_last, [n for n in WRITE_ALL if n != "dllm_cache"], (0, 1)),
    (reads_one_less, ALL, (0, 1)),
]


@pytest.mark.parametrize(
    ("fault", "name", "shift"),
    [
        (fault, name, shift)
        for fault, names, shifts in MUTANTS
        for name in names
        for shift in shifts
    ],
)
def test_a_broken_promise_is_noticed(
    monkeypatch: Patch, fault: Callable[[Patch, type[Cache]], None], name: str, shift: int
) -> None:
    fault(monkeypatch, caches.CACHES[name])
    assert noticed(SMALL[name], shift)


CLOCKED = [spec for spec in EXACT if "refresh_every=1" in spec]


@pytest.mark.parametrize("cache", some(CLOCKED, 3))
def test_a_refresh_that_is_left_out_is_noticed(monkeypatch: Patch, cache: str) -> None:
    """The identity breaks when a cache refreshes but once."""

    def once(self: Refreshing, canvas: Any, slots: Slots) -> bool:
        clock = slots.state(Clock)
        if clock.block is None:
            clock.block, clock.start = 0, canvas.step
        return clock.start == canvas.step

    monkeypatch.setattr(Refreshing, "due", once)
    run.cache_clear()
    with pytest.raises(AssertionError):
        for name in ("llada-tiny", "dream-tiny"):
            for sampler in ("llada(remasking=random)", "dream(alg=origin)"):
                identity(name, sampler, cache)
    run.cache_clear()


def trusts_values_alone(patch: Patch) -> None:
    """The layers of dLLM-Cache do not see what has changed."""
    plan: Any = DLLMCache.plan

    def untold(self: DLLMCache, canvas: Any, slots: Slots, targets: Any) -> Plan:
        result: Plan = plan(self, canvas, slots, targets)
        phases = slots.state(Phases)
        phases.changed = phases.changed[:0]
        return result

    patch.setattr(DLLMCache, "plan", untold)


def evicts_its_own(patch: Patch) -> None:
    """Sparse-dLLM's layers do not read the last position they compute."""
    before: Any = SparseCache.before_layer

    def narrow(self: SparseCache, canvas: Any, slots: Slots, layer: Any) -> Any:
        result = before(self, canvas, slots, layer)
        return result and replace(result, read=np.setdiff1d(result.read, result.compute[-1:]))

    patch.setattr(SparseCache, "before_layer", narrow)


@pytest.mark.parametrize(
    ("fault", "spec"),
    [(trusts_values_alone, "dllm_cache(50, 7, ratio=0)"), (evicts_its_own, "sparse")],
)
def test_a_fault_of_layers_is_noticed(
    monkeypatch: Patch, fault: Callable[[Patch], None], spec: str
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        layer_promises(monkeypatch, "llada-tiny", spec, 0)
