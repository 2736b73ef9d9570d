"""Everything that may be combined works, everything else is refused with a sentence.

The whole product of windows, selectors, stops and explorers decodes on a table model; what the
compatibility rules forbid raises and names both parts.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

import dllm
from dllm import cache as caches
from dllm.core.canvas import Canvas
from dllm.core.config import GenerationConfig
from dllm.core.errors import ConfigError
from dllm.eval.tasks import TASKS
from dllm.runtime.trace import TraceStep
from dllm.samplers import SAMPLERS, compose

from ..decoding import Decoding, canvas_for
from ..table import EOS, MASK, hashed, table_model
from ..thin import some

WINDOWS = ["blocks(4)", "whole", "adablock(4, delimiters=(3, 7))", "dcd(s_init=4)", "dsb(4)",
           "multi_blocks(4)"]  # fmt: skip
SELECTORS = ["", "threshold(0.3)", "factor", "eb", "localleap(0.5, 0.3)", "hierarchical(0.5, 0.2)",
             "r2", "fixed", "llada", "dream(alg=maskgit_plus)",
             "dparallel+neg_entropy",
             "fixed+margin", "fixed+random"]  # fmt: skip
STOPS = ["", "prophet(early=9, mid=3, late=2)"]
EXPLORERS = ["", "lopa(k=3)", "ete(k=3)", "freedave(draft_depth=3)"]
REVISERS = ["remdm", "edit", "edit(tau=0.2)"]

# What must be refused, whatever else is allowed (rules of the methods, not of this library).
FORBIDDEN = [
    "remdm+dcd", "edit+dsb", "freedave+dcd", "adablock+dcd",
    "freedave(threshold+r2)", "freedave+edit",
    "freedave+random", "freedave+prophet", "freedave+lopa", "lopa+ete",
    "prophet+remdm", "threshold+random", "threshold+margin",
    "localleap+neg_entropy", "dparallel+prob", "eotp+dcd+eos", "eotp+dcd", "llada+dcd", "dream+dsb",
    "edit+eos(eos_policy=first_commit)", "freedave+eos(eos_policy=first_commit)",
]  # fmt: skip


def decode(spec: str, cache: str = "none", seed: int = 3) -> Canvas:
    sampler = compose(spec, stop_ids=(EOS,))
    config = GenerationConfig(max_new_tokens=10)
    model = table_model(hashed(seed, 2.0))
    engine = Decoding(model, sampler, caches.compose(cache), config)
    canvas = canvas_for(model, [1, 2, 3], 10, 5)
    for _ in engine.run([canvas]):
        assert canvas.step < 200, f"{spec} does not end"
    return canvas


def names(spec: str) -> set[str]:
    return {part for part in SAMPLERS if part in spec}


def allowed(window: str, explorer: str) -> Iterator[str]:
    """Every selector and stop that may stand beside them; the others are refused."""
    for selector, stop in product(SELECTORS, STOPS):
        # DCD brings a rule that overwrites text: FreeDave refuses it, and says what to do.
        eos = "eos" if window.startswith("dcd") and explorer.startswith("freedave") else ""
        spec = "+".join(filter(None, (selector, window, stop, explorer, eos)))
        try:
            compose(spec)
        except ConfigError as error:
            assert " needs " in str(error) and str(error).count(" ") > 5, spec
            continue
        yield spec


@pytest.mark.parametrize("explorer", EXPLORERS)
@pytest.mark.parametrize("window", WINDOWS)
def test_the_product_of_parts(window: str, explorer: str) -> None:
    specs = list(allowed(window, explorer))
    assert len(specs) >= 5
    shift = WINDOWS.index(window) + EXPLORERS.index(explorer)
    for spec in specs[shift % 12 :: 12]:  # all of them decode in the slow test below
        canvas = decode(spec)
        assert canvas.finished and not canvas.masked.any(), spec
        assert MASK not in canvas.tokens[3:], spec


@pytest.mark.slow
@pytest.mark.parametrize("explorer", EXPLORERS)
@pytest.mark.parametrize("window", WINDOWS)
def test_the_product_of_parts_on_nano(window: str, explorer: str) -> None:
    mask = dllm.load("nano").facts.mask_token_id
    for spec in allowed(window, explorer):
        out = dllm.generate("nano", "Sort: Mia, Ben.", sampler=spec, max_new_tokens=10)
        assert out.finish_reason in ("stop", "length"), spec
        assert mask not in out.sequences[out.prompt_length :].tolist(), spec


@pytest.mark.parametrize(("reviser", "window"), list(product(REVISERS, WINDOWS)))
def test_revisers(reviser: str, window: str) -> None:
    spec = f"{reviser}+{window}"
    try:
        compose(spec)
    except ConfigError as error:
        assert reviser.partition("(")[0] in str(error)
        assert window.startswith(("dcd", "dsb", "multi_blocks"))
        return
    canvas = decode(spec)
    assert canvas.finished and not canvas.masked.any()


@pytest.mark.parametrize("spec", FORBIDDEN)
def test_forbidden_pairs_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError) as result:
        compose(spec)
    assert "\n" not in str(result.value)


@pytest.mark.parametrize(
    ("spec", "cache"),
    [("prophet", "elastic"), ("edit", "elastic")],
)  # fmt: skip
def test_forbidden_caches_are_refused(spec: str, cache: str) -> None:
    with pytest.raises(ConfigError, match=f"{spec} needs .*cache='{cache}'"):
        decode(spec, cache)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("s2d2(vocab_size=7)", "s2d2: vocab_size is the model's, 32: leave it out"),
        ("eos(eos_token_id=32)", "eos: eos_token_id 32 is outside the vocabulary of 32"),
        ("adablock(delimiters=(3, -1))", "adablock: delimiters -1 is outside the vocabulary of 32"),
    ],
)
def test_ids_are_those_of_the_model(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decode(spec)


@pytest.mark.parametrize(
    ("explorer", "cache"), some(product([e for e in EXPLORERS if e], ["prefix", "dual"]), 1)
)
def test_branches_share_a_cache(explorer: str, cache: str) -> None:
    prompt = TASKS["latin"].examples(1)[0].prompt
    spec = f"{explorer}+multi_blocks(4)" if explorer.startswith("ete") else explorer
    every = f"{cache}(refresh_every=1)"
    how = {"max_new_tokens": 12, "block_length": 4, "eos_policy": "none"}
    plain = dllm.generate("nano", prompt, sampler=spec, **how)
    exact = dllm.generate("nano", prompt, sampler=spec, cache=every, **how)
    assert exact.tokens == plain.tokens and exact.nfe == plain.nfe
    cached = dllm.generate("nano", prompt, sampler=spec, cache=cache, **how)
    assert len(cached.sequences) == len(plain.sequences) and cached.computed < plain.computed


NANO = ["adablock+localleap+prophet", "lopa(localleap, k=4)", "threshold+eotp"]
MORE = ["localleap", "dcd+localleap", "dsb", "ete",
        "r2", "freedave(threshold(tau=0.95))", "threshold+credit",
        "hierarchical"]  # fmt: skip


NOISY = [*(spec for spec in (*NANO, *MORE) if spec.split("(")[0] not in ("freedave",)
           and "credit" not in spec), "lopa", "llada", "dream", "threshold", "factor", "eb",
         "dparallel", "d3llm", "prophet", "fixed", "staged_blocks"]  # fmt: skip


@pytest.mark.parametrize("spec", some(NOISY, 3))
def test_sampling_is_a_function_of_the_seed(tiny: dllm.DiffusionModel, spec: str) -> None:
    how = {"sampler": spec, "max_new_tokens": 12, "temperature": 3.0}
    one, two, *others = (
        dllm.generate(tiny, "Mia 4 apples?", seed=seed, **how).sequences.tolist()
        for seed in (1, 1, 2, 3)
    )
    assert one == two
    assert any(other != one for other in others)


@pytest.mark.parametrize("seed", some(range(5), 2))
def test_a_step_keeps_the_budget_of_its_rule(seed: int) -> None:
    """From Bits to Rounds, 8.1: what a step commits beyond its best is bounded."""
    prompt = [5, 9, 12, 30 + seed]

    def steps(spec: str) -> list[TraceStep]:
        out = dllm.generate(
            "nano", prompt, sampler=spec, max_new_tokens=32, trace=True, eos_policy="none"
        )
        assert out.trace is not None
        for step in out.trace.steps:
            bits = -sum(q for _, _, q in step.commits) / np.log(2)
            assert step.bits == pytest.approx(bits, abs=1e-3)
        return [step for step in out.trace.steps if not step.forced]

    for step in steps("threshold(0.5)"):
        assert step.bits <= len(step.commits) + 1e-6
    for step in steps("factor(0.8)"):
        if (n := len(step.commits)) > 1:
            assert step.bits <= -n * np.log2(1 - 0.8 / (n + 1)) + 1e-6


def test_a_step_keeps_the_budget_of_its_entropies() -> None:
    sampler, most = compose("eb(gamma=0.5)"), 0
    engine = Decoding(table_model(hashed(2)), sampler, caches.compose("none"), GenerationConfig())
    canvas = Canvas.for_prompt(np.array([1, 2, 3]), 24, mask_id=MASK, pad_id=EOS)
    for (step,) in engine.run([canvas]):
        entropy = step.prediction.at(np.sort(step.decision.committed)).entropy
        assert entropy is not None
        assert entropy.sum() - entropy.max() <= 0.5 + 1e-6
        most = max(most, len(entropy))
    assert most > 1
