"""What holds for every sampler, cache and model, on models that are hash functions."""

import numpy as np
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dllm import cache as caches
from dllm.core.canvas import Canvas
from dllm.core.config import GenerationConfig
from dllm.core.errors import ConfigError
from dllm.samplers import compose
from dllm.samplers.eos import CHECKS

from ..decoding import Decoding, canvas_for
from ..table import EOS, MASK, hashed, table_model, with_probabilities

SPECS = [
    "llada", "llada(remasking=random)", "threshold(0.3)", "threshold(inf)", "threshold(0)",
    "factor(0.7)", "eb(gamma=0.5)", "dparallel(1)", "dream", "dream(alg=origin)",
    "dream(alg=maskgit_plus, alg_temp=1.0)", "threshold(0.5)+factor(2)",
    "threshold(0.3)+blocks(4)", "localleap(0.5, 0.3)", "hierarchical(0.5, 0.2)",
    "threshold(0.4)+dcd(s_init=4)", "threshold(0.4)+dsb(4)",
    "threshold(0.4)+adablock(4, delimiters=(3, 7))", "threshold(0.4)+r2",
    "d3llm(1)", "llada+prophet(early=6, mid=4, late=3)", "threshold(0.4)+dsb(4)+prophet",
    "threshold(0.4)+credit",
]  # fmt: skip
SEARCHES = ["edit(0.3)", "lopa(threshold(0.4), k=3)", "lopa+dsb(4)",
            "ete(threshold(0.4), tau=0.4)", "freedave(threshold(0.4))",
            "freedave+dsb(4)"]  # fmt: skip
CACHES = ["none", "prefix", "dual", "dkv", "dkv_pd", "window_diffusion(4, active=3, window=5)"]


def canvas_of(prompt: list[int], new_tokens: int) -> Canvas:
    return canvas_for(table_model(hashed(0)), prompt, new_tokens, 7)


@settings(max_examples=50, deadline=None)
@given(
    spec=st.sampled_from(SPECS),
    cache=st.sampled_from(CACHES),
    policy=st.sampled_from(sorted(CHECKS)),
    prompts=st.lists(st.lists(st.integers(0, 29), min_size=1, max_size=9), min_size=1, max_size=3),
    masks=st.integers(1, 24),
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 0.7]),
    shift=st.sampled_from([0, 1]),
)  # fmt: skip
def test_decoding_is_orderly(
    spec: str, cache: str, policy: str, prompts: list[list[int]], masks: int, seed: int,
    temperature: float, shift: int,
) -> None:  # fmt: skip
    """(a) ends in time, (b) never rewrites, (c) commits where it may, (d) masks only fall, (e)
    decides on what it asked for."""
    model = table_model(hashed(seed), logit_shift=shift)
    config = GenerationConfig(max_new_tokens=masks, temperature=temperature, seed=seed)
    try:
        sampler = compose(spec, options={"eos_policy": policy}, stop_ids=(EOS,))
        engine = Decoding(model, sampler, caches.compose(cache), config)
    except ConfigError as error:
        assert " needs " in str(error)
        reject()
    canvases = [canvas_of(prompt, masks) for prompt in prompts]
    decided: dict[int, dict[int, int]] = {id(canvas): {} for canvas in canvases}
    windows: dict[int, tuple[int, int]] = {}
    for steps in engine.run(canvases):
        for step in steps:
            canvas, committed = step.canvas, step.decision.committed
            known = decided[id(canvas)]
            assert committed.size > 0
            assert set(committed) <= set(step.prediction.positions)  # (c), (e)
            assert not set(committed) & set(known)
            rows = np.maximum(step.prediction.positions - shift, 0)
            assert set(rows) <= set(step.plan.compute)
            for position, token in known.items():  # (b)
                cut = canvas.stop_position is not None and position > canvas.stop_position
                assert canvas.tokens[position] == token or cut
            known |= {int(p): int(canvas.tokens[p]) for p in committed}
            low, high = windows.get(id(canvas), canvas.window)
            assert canvas.window[0] >= low or canvas.window == (low, high)
            windows[id(canvas)] = canvas.window
    for canvas in canvases:
        assert canvas.finished
        assert not canvas.masked.any()
        assert canvas.nfe <= masks  # (a): a forward commits at least one position
        assert MASK not in canvas.tokens[canvas.prompt_length :]


@settings(max_examples=30, deadline=None)
@given(
    spec=st.sampled_from(SEARCHES), masks=st.integers(1, 24), seed=st.integers(0, 10**6),
    sharpness=st.sampled_from([1.0, 4.0]),
)  # fmt: skip
def test_searching_and_revising_end_in_time(
    spec: str, masks: int, seed: int, sharpness: float
) -> None:
    """Explorers decide one position per forward; ETE's first may decide nothing.
    Editing looks 16 times more at what is decided."""
    most = masks + spec.startswith("ete")
    if spec.startswith("edit"):
        most = masks + 16
    sampler = compose(spec, stop_ids=(EOS,))
    config = GenerationConfig(max_new_tokens=masks)
    model = table_model(hashed(seed, sharpness))
    canvas = canvas_of([1, 2, 3], masks)
    for (step,) in Decoding(model, sampler, caches.compose("none"), config).run([canvas]):
        assert (step.decision.remasked >= 3).all()
        assert canvas.nfe <= most
    assert canvas.finished and not canvas.masked.any()
    assert canvas.tokens[:3].tolist() == [1, 2, 3]
    assert MASK not in canvas.tokens[3:]


def test_the_mask_is_never_proposed() -> None:
    """T25: a model that prefers [MASK] everywhere."""

    def table(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        rows = np.tile(with_probabilities(4, 0.6), (len(ids), 1))
        rows[:, MASK] = 50.0
        return rows

    engine = Decoding(table_model(table), compose("threshold(0.5)"), caches.compose("none"),
                    GenerationConfig(max_new_tokens=6))  # fmt: skip
    canvas = canvas_of([1, 2], 6)
    assert len(list(engine.run([canvas]))) == 1
    assert canvas.tokens.tolist() == [1, 2] + [4] * 6


def test_a_mask_id_in_the_prompt_is_text() -> None:
    """G2: what is undecided is known by a boolean, not by the id."""
    engine = Decoding(table_model(hashed(1)), compose("llada"), caches.compose("none"),
                    GenerationConfig(max_new_tokens=3))  # fmt: skip
    canvas = canvas_of([MASK, 3, MASK], 3)
    list(engine.run([canvas]))
    assert canvas.tokens[:3].tolist() == [MASK, 3, MASK]
    assert canvas.nfe == 3


def test_short_texts_are_kept_from_stopping() -> None:
    def table(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return np.tile(with_probabilities(EOS, 0.9), (len(ids), 1))

    sampler = compose("threshold(inf)", stop_ids=(EOS,))
    config = GenerationConfig(max_new_tokens=8, min_new_tokens=3)
    engine = Decoding(table_model(table), sampler, caches.compose("none"), config)
    canvas = canvas_of([1], 8)
    list(engine.run([canvas]))
    assert EOS not in canvas.tokens[1:4]
    assert canvas.stop_position == 4
