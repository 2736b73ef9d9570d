"""What is asked before a forward only reads: nothing that a part remembers changes by asking."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from dllm.core.canvas import Canvas
from dllm.samplers import Sampler

from ..table import hashed
from .test_methods import run

SPECS = [
    "llada", "dream(alg=maskgit_plus)", "dream(alg=origin)",
    "threshold(0.4)+credit", "threshold(0.4)+r2",
    "adablock(4, delimiters=(3, 7))+threshold(0.4)", "dcd(s_init=4)", "dsb(4)", "ete(k=3)",
    "lopa(k=3)", "freedave(draft_depth=3)",
    "remdm", "edit(0.3)", "d3llm", "prophet",
    "threshold+eotp", "llada(remasking=random)",
]  # fmt: skip


def snapshot(canvas: Canvas) -> dict[type, bytes]:
    return {kind: pickle.dumps(state) for kind, state in canvas.states.items()}


@pytest.mark.parametrize("spec", SPECS)
def test_questions_change_nothing(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def ask(self: Sampler, canvas: Canvas, *rest: Any) -> Any:
            before, window = snapshot(canvas), canvas.window
            result = method(self, canvas, *rest)
            for selector in self.selectors:
                selector.rests(canvas)
            after = snapshot(canvas)
            fresh = {kind: pickle.dumps(kind()) for kind in after.keys() - before.keys()}
            assert after == {**before, **fresh}, name
            assert canvas.window == window
            asked.append(name)
            return result

        return ask

    for name in ("reads", "feeds", "foreseen"):
        monkeypatch.setattr(Sampler, name, watched(name, getattr(Sampler, name)))
    cache = "dkv_greedy" if "random" in spec else "none"
    canvas = run(spec, hashed(3, 2.0), cache=cache)
    assert canvas.finished
    assert ("foreseen" if cache == "dkv_greedy" else "reads") in asked


def test_a_fork_has_states_of_its_own() -> None:
    canvas = run("llada", hashed(1), masks=4)
    twin = canvas.fork()
    for kind, state in canvas.states.items():
        assert twin.states[kind] is not state
