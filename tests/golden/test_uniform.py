"""Recorded runs of DiffusionGemma: transformers' generate, diffusers' pipeline and schedulers.

Every draw of a case is recorded, and handed out here in the place of keyed noise: what each step
feeds, draws, accepts and moves is compared, the text, and how many passes it took.  A row of a
batch is replayed with the others and alone.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pytest

import dllm
from dllm.cache import compose as compose_cache
from dllm.core.canvas import FED, PROPOSAL, PURPOSES, SELECTION, Canvas
from dllm.core.config import GenerationConfig
from dllm.engine import Engine
from dllm.engine.recipe import MaskedRecipe
from dllm.samplers import Prediction, Reviser, compose
from dllm.samplers.base import Reads, top
from dllm.samplers.entropy_bound import EntropyBound, Settled
from dllm.samplers.turn import Turn

from ..thin import some
from .conftest import goldens_dir
from .recorded import recorded

Case = dict[str, Any]
IDS = "input ids"  # name of what a step feeds, among its draws


def cases(algorithm: str) -> list[Any]:
    """All of a folder, in whatever files, for `some` to choose from."""
    return [pytest.param(*case.values, id=case.id) for case in recorded(algorithm)]


@cache
def model_of(name: str, source: str = "clean") -> dllm.DiffusionModel:
    return dllm.load(goldens_dir() / name, score_source=source)


class Replay:
    """One row of a case: its steps in turn, and the draws that each of them takes."""

    def __init__(self, case: Case, row: int) -> None:
        self.case, self.row = case, row
        given = case["prompt"][row]
        seen = case.get("attention_mask")
        self.prompt = np.array([t for i, t in enumerate(given) if not seen or seen[row][i]])
        self.size = len(case["canvases"][0]["init"][0])
        self.facts = model_of(case["model"]).facts
        self.steps: list[Case] = []  # of this row alone, each with its canvas and its ids
        self.texts: list[list[int]] = []
        stops = case["eos_token_id"]
        self.stops = (stops,) if isinstance(stops, int) else tuple(stops)
        ends = case.get("pad_token_id") is not None
        for number, canvas in enumerate(case["canvases"]):
            ids = canvas["init"][row]
            for step in canvas["steps"]:
                for one in self._forwards(step):
                    self.steps.append({**one, "canvas": number, IDS: ids})
                    ids = one.get("random", ids)
                if step.get("stopped", [False] * (row + 1))[row]:
                    break
            self.texts.append(canvas["text"][row])
            if ends and {*canvas["text"][row]} & {*self.stops}:
                break

    def _forwards(self, step: Case) -> Iterator[Case]:
        """The forwards of a recorded step: its own, then those of the corrector's sweeps."""
        row = self.row
        own = {k: v[row] for k, v in step.items() if isinstance(v, list)}
        own["random"] = own.get("random", own.get("renoise"))
        yield own | {"sweep": None}
        for sweep in step.get("corrector", []):
            own = {k: v[row] for k, v in sweep.items()}
            drawn = np.full(len(own["in"]), 0.5)
            drawn[own["positions"]] = own["u"]
            yield own | {"u": drawn, "route_u": own["rand"], "sweep": sweep}

    def noise(self, stream: int, step: int, positions: Any) -> Any:
        """In place of keyed numbers."""
        now = self.steps[min(step, len(self.steps) - 1)]
        at = positions - len(self.prompt) - now["canvas"] * self.size
        size = self.facts.vocab_size
        if stream >= FED:
            ids = now[IDS]
            if step and (at[0] < 0 or step == len(self.steps)):  # behind the last step of a canvas
                ids = self.steps[step - 1]["random"]
            return (np.array(ids)[at % self.size] + 0.5) / size
        if stream % PURPOSES == PROPOSAL:
            return np.array(now["u"], np.float32)[at]
        assert stream % PURPOSES == SELECTION
        return np.array(now["route_u"])[at]

    def canvas(self) -> Canvas:
        facts = self.facts
        return Canvas.for_prompt(
            self.prompt, self.size * len(self.case["canvases"]), mask_id=-1,
            pad_id=facts.pad_token_id or 0, noise=self.noise,
        )  # fmt: skip

    def holds(self, canvas: Canvas) -> list[int]:
        """What the open canvas is fed as next."""
        low = len(self.prompt) + self.steps[canvas.step]["canvas"] * self.size
        at = np.arange(low, low + self.size)
        return canvas.fed_ids(at, self.facts.vocab_size).tolist()


def replay(
    case: Case, rows: list[int], sampler: Any, check: Callable[[Case, Any], None],
    kept: str = "block", source: str = "clean", **config: Any,
) -> None:  # fmt: skip
    """Decode the rows together; ``check`` compares a recorded step with one of the engine's."""
    model = model_of(case["model"], source)
    replays = [Replay(case, row) for row in rows]
    ends = case.get("pad_token_id") is not None
    composed = compose(
        sampler, options={"eos_policy": "prefix_complete" if ends else "none"},
        stop_ids=replays[0].stops, family=model.family.name,
        facts={"block_length": replays[0].size, "vocab_size": model.facts.vocab_size},
    )  # fmt: skip
    engine = Engine(model, compose_cache(kept))
    recipe = MaskedRecipe(composed, config=GenerationConfig(**config))
    live = {id(r.canvas()): r for r in ()}
    canvases = []
    for one in replays:
        canvas = one.canvas()
        live[id(canvas)] = one
        canvases.append(canvas)
        assert engine.admit(canvas, recipe) is not None
    while engine.live:
        for row in engine.live:
            one = live[id(row.canvas)]
            assert one.holds(row.canvas) == one.steps[row.canvas.step]["in"]
        before = {id(row.canvas): row.canvas.step for row in engine.live}
        for step in engine.step():
            one = live[id(step.canvas)]
            check(one.steps[before[id(step.canvas)]], step)
        for row in engine.live:
            assert row.error is None, row.error
    for canvas, one in zip(canvases, replays, strict=True):
        assert canvas.nfe == len(one.steps)
        low, wanted = len(one.prompt), [*chain.from_iterable(one.texts)]
        written = canvas.tokens[low : canvas.length].tolist()
        pads = [model.facts.pad_token_id] * (len(wanted) - len(written))
        assert written + pads == wanted, one.row


def bound(case: Case) -> dict[str, Any]:
    """Arguments of `EntropyBound`."""
    return {
        "entropy_bound": case["entropy_bound"], "t_min": case["t_min"], "t_max": case["t_max"],
        "max_denoising_steps": case.get("max_denoising_steps", case.get("num_inference_steps")),
        "stability_threshold": case["stability_threshold"],
        "confidence_threshold": case["confidence_threshold"] or 0,
    }  # fmt: skip


def accepts(sampler: EntropyBound) -> Callable[[Case, Any], None]:
    def check(recorded: Case, step: Any) -> None:
        p = step.prediction
        low = int(p.positions[0])
        assert p.token.tolist() == recorded["drawn"]
        assert (p.positions[sampler.accepted(p)] - low).tolist() == recorded["accepted"]
        if "argmax" in recorded:
            assert p.top_token[:, 0].tolist() == recorded["argmax"]
            np.testing.assert_allclose(p.entropy, recorded["entropy"], atol=2e-4)

    return check


GENERATE = cases("generate")


@pytest.mark.parametrize("case", some(GENERATE, 1))
def test_generate_of_transformers(case: Case) -> None:
    sampler = EntropyBound(**bound(case))
    rows = [*range(len(case["prompt"]))]
    for some_rows in [rows, *([row] for row in rows if len(rows) > 1)]:
        for kept in ("block", "none"):
            replay(case, some_rows, sampler, accepts(sampler), kept)
    passes = [len(Replay(case, row).steps) for row in rows]
    assert passes == case["decoder_passes"]


class Pipeline(EntropyBound):
    """diffusers ends a canvas that has not settled as it stands, with its noise."""

    vocab_size = 0  # of the model of a case

    def final(self, canvas: Canvas, p: Prediction, settled: bool) -> Any:
        if settled:
            return super().final(canvas, p, settled)
        random = canvas.noise(FED + canvas.row, canvas.step + 1, p.positions)
        ids = (random * self.vocab_size).astype(np.int64)
        return np.where(self.accepted(p), p.token, ids), p.logprob


class BlockRefinement(Reviser):
    """diffusers' scheduler: tokens are committed by a quota that is owed in all, and above a
    threshold; all forwards are made; decided tokens may be edited."""

    statistics = {"entropy": 1, "top_token": 1, "top_logprob": 1}  # noqa: RUF012

    def __init__(self, case: Case) -> None:
        object.__setattr__(self, "case", case)

    def begin_block(self, canvas: Canvas) -> None:
        canvas.states[Settled] = Settled()

    def reads(self, canvas: Canvas) -> Reads:
        return Reads(np.arange(*canvas.window))

    def decide(self, turn: Turn) -> None:
        case, canvas = self.case, turn.canvas
        low, high = canvas.window
        k, steps = canvas.block_step, case["num_inference_steps"]
        everything = turn.view.all_predictions
        score = turn.view.score
        owed = -(-(k + 1) * (high - low) // steps) - int((~canvas.masked[low:high]).sum())
        threshold, bar = case["threshold"], case["editing_threshold"]
        old = everything.take(~canvas.masked[everything.positions])
        turn.choose_these(top(score, max(0, owed)) | (score > threshold))
        turn.commit()
        if bar is not None:
            edited = (old.token != canvas.tokens[old.positions]) & (np.exp(old.logprob) > bar)
            old = old.take(edited)
            turn.rewrite(old.positions, old.token, old.logprob)
        settled = canvas.state(Settled).settled(
            everything.top_token[:, 0], everything.entropy, max(1, case["stability_threshold"]),
            case["confidence_threshold"] or 0,
        )  # fmt: skip
        if settled:
            turn.rewrite(everything.positions, everything.top_token[:, 0], everything.logprob)
        turn.open = not settled and k + 1 < steps
        turn.go_on()


def ddim(case: Case) -> str:
    return (
        f"ddim(num_inference_steps={case['num_inference_steps']}, "
        f"stability_threshold={max(1, case['stability_threshold'])}, "
        f"confidence_threshold={case['confidence_threshold'] or 0}"
        + "".join(f", {k}={v}" for k, v in case.items() if k.startswith("corrector_"))
        + ")"
    )


def proposes(recorded: Case, step: Any) -> None:
    if recorded["sweep"] is not None:
        return
    p = step.prediction
    low = len(recorded["in"]) * recorded["canvas"] + step.canvas.prompt_length
    assert p.token.tolist() == [recorded["drawn"][at - low] for at in p.positions]


PIPELINE = cases("pipeline")


CASES = [*GENERATE, *PIPELINE]
PARTS = frozenset({"entropy_bound", "ddim"})  # what replays them, for benchmarks/fidelity.py


@pytest.mark.parametrize("case", some(PIPELINE, 1))
def test_pipeline_of_diffusers(case: Case) -> None:
    config = {"temperature": case["temperature"]} if case["temperature"] else {}
    check, source = proposes, "clean"
    if case["scheduler"] == "entropy_bound":
        sampler: Any = Pipeline(**bound(case) | {
            "stability_threshold": max(1, case["stability_threshold"])
        })  # fmt: skip
        object.__setattr__(sampler, "vocab_size", model_of(case["model"]).facts.vocab_size)
        check = accepts(sampler)
    elif case["scheduler"] == "block_refinement":
        sampler, source = BlockRefinement(case), "tempered"
    else:
        sampler = ddim(case)
    rows = [*range(len(case["prompt"]))]
    for some_rows in [rows, *([row] for row in rows if len(rows) > 1)]:
        replay(case, some_rows, sampler, check, source=source, **config)
