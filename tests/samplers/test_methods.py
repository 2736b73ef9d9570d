"""What each method commits, takes back or opens, given tables of numbers (T10-T22)."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dllm.cache import compose as compose_cache
from dllm.core.canvas import Canvas
from dllm.core.config import GenerationConfig
from dllm.core.errors import ConfigError
from dllm.samplers import Prediction, View, compose
from dllm.samplers.credit import Credit
from dllm.samplers.daedal import Daedal, First, end_confidence
from dllm.samplers.ddim import DDIM
from dllm.samplers.dream import transfer_rate
from dllm.samplers.entropy_bound import Settled

from ..decoding import Decoding, canvas_for
from ..table import EOS, MASK, VOCAB, hashed, table_model, with_probabilities
from .test_vectors import canvas_of, committed, decide, predict

ROW = [0.95, 0.80, 0.70, 0.76, 0.74, 0.75, 0.60, 0.80, 0.10, 0.78, 0.91, 0.50]


@pytest.mark.parametrize(
    ("spec", "row", "expected"),
    [
        ("localleap(w=4)", ROW, {0, 1, 3, 7, 9, 10}),
        ("localleap(w=2)", ROW, {0, 1, 9, 10}),
        ("localleap", [0.5, 0.8, 0.7], {1}),
        ("localleap(tau_r=0.9)", ROW, {0, 10}),
        ("hierarchical(0.9, 0.4)", [0.5, 0.95, 0.3, 0.2], {1}),
        ("threshold(tau=1)", [1.0, 0.5, 1.0], {0, 2}),  # what reaches the bound is committed
        ("fixed(3)", [0.2, 0.9, 0.9, 0.1, 0.3], {1, 2, 4}),
    ],
    ids=["T10 w=4", "T10 w=2", "no anchor", "T27", "one run", "equal", "fixed"],
)
def test_a_step_commits(spec: str, row: list[float], expected: set[int]) -> None:
    assert committed(spec, row) == expected


def test_decided_positions_are_no_anchors() -> None:
    """T11."""
    canvas, sampler = canvas_of(12), compose("localleap(w=2)")
    canvas.commit(np.array([0]), np.array([1]), np.zeros(1, np.float32))
    sampler.prepare(canvas)
    assert set(decide(sampler, canvas, predict(canvas, ROW[1:])).committed) == {9, 10}


def test_every_gap_gets_one_commit() -> None:
    """T18: position 2 is decided already and splits the runs."""
    canvas, sampler = canvas_of(5), compose("hierarchical(0.9, 0.4)")
    canvas.commit(np.array([2]), np.array([1]), np.zeros(1, np.float32))
    sampler.prepare(canvas)
    decision = decide(sampler, canvas, predict(canvas, [0.5, 0.95, 0.45, 0.3]))
    assert set(decision.committed) == {1, 3}


@pytest.mark.parametrize(
    ("pattern", "end", "window"),
    [
        ("MMMMMMMMMMMM", 12, (0, 4)),
        (".M.MMMMMMMMM", 12, (1, 6)),
        ("M......MMMMM", 12, (0, 8)),
        ("..M.......MM", 12, (2, 10)),
        ("...M.M...MMM", 9, (3, 9)),
    ],
)
def test_dcd_shows_the_first_masks(pattern: str, end: int, window: tuple[int, int]) -> None:
    """T13."""
    canvas = canvas_of(12)
    canvas.masked[:] = [c == "M" for c in pattern]
    if end < 12:
        canvas.cut(end - 1)
    compose("dcd(s_init=4, s_max=8)").prepare(canvas)
    assert canvas.window == window


def test_dsb_moves_with_every_commit() -> None:
    canvas, greedy, const = canvas_of(20), compose("dsb(4)"), compose("dsb(4, k_max=5)")
    canvas.masked[[1, 2, 3]] = False
    greedy.prepare(canvas)
    assert canvas.window == (0, 7)
    const.prepare(canvas)
    assert canvas.window == (0, 5)


@pytest.mark.parametrize(
    ("gen", "start", "threshold", "tokens", "probabilities", "size"),
    [
        (16, 0, 0.3, [5, 9, 5, 9], [0.8, 0.2, 0.8, 0.5], 4),
        (16, 0, 0.6, [5, 9, 5, 9], [0.8, 0.2, 0.8, 0.5], 8),
        (16, 13, 0.3, [5, 5, 5], [0.8, 0.8, 0.8], 3),
        (16, 0, 0.3, [5, 9, 5, 9], [0.8, 0.5, 0.8, 0.4], 2),
        (16, 0, float(np.exp(np.log(np.float32(0.4)))), [5, 5, 5, 9], [0.8, 0.8, 0.8, 0.4], 4),
    ],
    ids=["T15", "T15 no delimiter is sure", "T16", "likelier is not last", "equals the threshold"],
)
def test_adablock_ends_where_the_text_does(
    gen: int, start: int, threshold: float, tokens: list[int], probabilities: list[float], size: int
) -> None:
    canvas = canvas_of(gen)
    sampler = compose(f"adablock(8, delimiters=(9,), delimiter_threshold={threshold})+fixed")
    canvas.masked[:start] = False
    canvas.window = (0, start)
    sampler.prepare(canvas)
    n = len(canvas.masks())
    row = [*probabilities, *[0.1] * (n - len(probabilities))]
    ids = [*tokens, *[5] * (n - len(tokens))]
    decide(sampler, canvas, predict(canvas, row, tokens=ids))
    assert canvas.window == (start, start + size)


@pytest.mark.parametrize("id_", [-1, 10**12])
def test_a_delimiter_that_no_token_has_ends_nothing(id_: int) -> None:
    canvas, sampler = canvas_of(16), compose(f"adablock(4, delimiters=({id_},))+fixed")
    sampler.prepare(canvas)
    n = len(canvas.masks())
    decide(sampler, canvas, predict(canvas, [0.9] * n, tokens=[VOCAB - 1] * n))
    assert canvas.window == (0, 4)


def test_daedal_at_equality() -> None:
    """An end that is as sure as ``enough`` or ``insert_until`` asks for is; a guess as sure as
    ``low`` is not replaced."""
    canvas = canvas_of(4, cap=20)
    canvas.open_window(0, 4)
    prediction = predict(canvas, [0.2, 0.3, 0.25, 0.6], tokens=[5, 5, 5, EOS])
    view = View(canvas, prediction, np.exp(prediction.logprob), prediction)
    sure = end_confidence(prediction, EOS, 1)
    above = float(np.nextafter(sure, 1))
    low = float(np.exp(prediction.logprob[0]))

    def edits(step: str, **given: Any) -> list[tuple[int, int, int]]:
        part = Daedal(tokens=1, eos_token_id=EOS, expand=3, **given)
        canvas.states.pop(First, None)
        found = part.resize(view, np.array([1])) if step == "insert" else (
            part._lengthen(canvas, prediction)
        )  # fmt: skip
        return [(edit.at, edit.removed, edit.added) for edit in found]

    assert edits("first", enough=sure) == []
    assert edits("first", enough=above) == [(4, 0, 3)]
    more = float(np.nextafter(np.float32(low), np.float32(1)))
    assert edits("insert", insert_until=above, low=more) == [(0, 1, 3)]
    assert edits("insert", insert_until=sure, low=more) == []
    assert edits("insert", insert_until=above, low=low) == []


def test_dmax_at_equality() -> None:
    """A block that is as sure as ``settled`` everywhere is written, else its first position."""
    half = np.exp(np.log(np.full(4, 0.5, np.float32)))[0]
    for settled, written in ((half, 4), (np.nextafter(half, np.float32(1)), 1)):
        canvas, sampler = canvas_of(4), compose(f"dmax(0.9, settled={float(settled)})")
        sampler.prepare(canvas)
        p = predict(canvas, [0.5] * 4)
        p = replace(p, top_token=p.token[:, None], top_logprob=p.logprob[:, None])
        assert len(decide(sampler, canvas, p).committed) == written


@pytest.mark.parametrize(("family", "size"), [("llada", 3), ("dream", 2)])
def test_adablock_looks_at_what_was_drawn_or_at_the_likeliest(family: str, size: int) -> None:
    """With temperature: LLaDA's code finds delimiters among the drawn tokens, Dream's does not."""
    canvas = canvas_of(16)
    sampler = compose("adablock(8, delimiters=(9,), fraction=0.25)+fixed", family=family)
    sampler.prepare(canvas)
    chances = np.log(np.full(16, 0.6, np.float32))
    drawn, likeliest = np.full((2, 16), 5)
    drawn[2], likeliest[1] = 9, 9
    prediction = Prediction(
        np.arange(16), drawn, chances, max_logprob=chances, top_token=likeliest[:, None]
    )
    decide(sampler, canvas, prediction)
    assert canvas.window == (0, size)


def test_defaults_that_depend_on_the_family() -> None:
    relaxed = [compose("localleap", family=name).selectors[0] for name in ("llada", "dream")]
    assert [part.tau_r for part in relaxed] == [0.75, 0.8]  # type: ignore[attr-defined]


def test_blocks_open_as_in_the_published_runs() -> None:
    """A block opens at a tenth of the one before it, and is active at 95 %."""
    for name in ("d2f", "d3llm", "staged_blocks"):
        window: Any = compose(name).window
        assert (window.block_add_threshold, window.decoded_token_threshold) == (0.1, 0.95)


def test_a_staged_block_may_be_larger_than_any_text() -> None:
    rows = [run(f"d2f+staged_blocks({size})", hashed(1)) for size in (16, 2**63, 10**30)]
    assert len({tuple(row.tokens.tolist()) for row in rows}) == 1


@pytest.mark.parametrize("alpha", [0.7, 100.0])
def test_credit_is_logits_with_a_memory(alpha: float) -> None:
    """Against the definition on whole rows of logits; float32 does not hold exp of large ones."""
    rng = np.random.default_rng(0)
    canvas, part = canvas_of(3), Credit(credit_alpha=alpha)
    part.begin_block(canvas)
    credit = np.zeros((3, 8), np.float32)
    for _ in range(6):
        logits = rng.normal(size=(3, 8)).astype(np.float32)
        logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        first = logp.argmax(1)
        credit *= part.decay_beta
        credit[np.arange(3), first] += np.exp(logp.max(1)) ** part.boost_gamma
        fused = logp.astype(np.float64) + part.credit_alpha * np.log1p(credit)
        fused -= np.log(np.exp(fused).sum(1, keepdims=True))
        ids = part.reads(canvas).ids
        assert ids is not None
        asked = {"credit": np.take_along_axis(logp, ids, 1)}
        at = np.arange(3)
        prediction = Prediction(at, first, logp.max(1), max_logprob=logp.max(1), asked=asked)
        result = part.apply(canvas, prediction)
        assert result.token.tolist() == fused.argmax(1).tolist()
        assert np.allclose(result.logprob, fused.max(1), atol=1e-5)


def run(spec: str, table: Any, masks: int = 16, cache: str = "none", **how: Any) -> Canvas:
    sampler = compose(spec, options=how, stop_ids=(EOS,))
    config = GenerationConfig(max_new_tokens=masks)
    model = table_model(table)
    engine = Decoding(model, sampler, compose_cache(cache), config)
    canvas = canvas_for(model, [1, 2, 3], masks)
    for _ in engine.run([canvas]):
        pass
    return canvas


def test_eb_follows_the_score() -> None:
    """Whoever orders positions: another scorer, or a rule that wants stop ids last."""
    row, statistics = [0.9, 0.5, 0.4], {"entropy": [1.0] * 3, "margin": [0.1, 0.2, 0.3]}
    assert committed("eb(gamma=0)", row, **statistics) == {0}
    assert committed("eb(gamma=0, proxy=margin)", row, **statistics) == {2}
    assert committed("eb(gamma=0)+margin", row, **statistics) == {2}
    sampler, canvas = (
        compose("eb(gamma=0)+eos(eos_policy=rank_last)", stop_ids=(EOS,)),
        canvas_of(3),
    )
    sampler.prepare(canvas)
    prediction = predict(canvas, row, tokens=[EOS, 1, 1], **statistics)
    assert set(decide(sampler, canvas, prediction).committed) == {1}


def agreeing(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A model that knows every position from the start."""
    return np.stack([with_probabilities(4 + int(p) % 7, 0.9 - 0.01 * int(p)) for p in positions])


def test_freedave_commits_its_depth_when_drafts_hold() -> None:
    """T21."""
    plain = run("fixed", agreeing)
    result = run("freedave(draft_depth=3)", agreeing)
    assert result.tokens.tolist() == plain.tokens.tolist()
    assert result.nfe == 1 + -(-(plain.nfe - 1) // 3)


def test_freedave_commits_one_token_when_every_commit_changes_the_next() -> None:
    """T22."""

    def changing(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        left = int((ids == MASK).sum())
        return np.stack([with_probabilities(4 + left % 7, 0.9 - 0.01 * int(p)) for p in positions])

    plain, result = run("fixed", changing), run("freedave(draft_depth=3)", changing)
    assert result.tokens.tolist() == plain.tokens.tolist()
    assert result.nfe == plain.nfe == 16


@pytest.mark.parametrize("seed", range(4))
def test_freedave_changes_nothing_when_drafts_fail(seed: int) -> None:
    """A model whose predictions change with every token."""
    for base in ("fixed", "threshold(0.4)", "localleap(0.5, 0.3)"):
        plain, result = run(base, hashed(seed)), run(f"freedave({base})", hashed(seed))
        assert result.tokens.tolist() == plain.tokens.tolist()
        assert result.nfe <= plain.nfe


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        ("localleap(0.4, 0.4)", "threshold(0.4)"),
        ("lopa(threshold(0.4), k=1)", "threshold(0.4)"),
        ("ete(threshold(0.4), k=1, tau=0.4)+multi_blocks(lookahead=0)", "threshold(0.4)"),
        (
            "threshold(0.4)+r2(confidence_cluster_size=None, token_cluster=None, "
            "temporal_steps=None)",
            "threshold(0.4)",
        ),
        ("threshold(0.4)+adablock(delimiters=())", "threshold(0.4)"),
        (
            "threshold(0.4)+adablock(4, delimiters=(3, 7, 9, 11), delimiter_threshold=inf)",
            "threshold(0.4)+blocks(4)",
        ),
        ("threshold(inf)", "fixed"),
        ("eb(gamma=0)", "fixed"),
        ("factor(1e-9)", "fixed"),
        ("llada", "fixed"),
        ("freedave(draft_depth=1)", "fixed"),
        ("threshold(0.4)+credit(credit_alpha=0)", "threshold(0.4)"),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_degenerate_settings_are_the_simpler_method(spec: str, same: str, seed: int) -> None:
    """T27."""
    result, expected = run(spec, hashed(seed)), run(same, hashed(seed))
    assert result.tokens.tolist() == expected.tokens.tolist()
    assert result.commit_step.tolist() == expected.commit_step.tolist()
    assert result.nfe == expected.nfe


def test_dcd_extends_a_block_instead_of_committing_blindly() -> None:
    def unsure(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return np.stack([with_probabilities(4, 0.25) for _ in positions])

    plain = run("dcd(s_init=8, block_length=4)", unsure)
    result = run("dcd(s_init=8, block_length=4, e_max=4)", unsure)
    assert plain.nfe == 16
    assert result.nfe == 16 + 2  # each of the two blocks, now of 8, was extended once
    assert not result.masked.any()
    # A window that is no wider than the block reaches beyond it only after its first commit.
    narrow = run("dcd(s_init=4, block_length=4, e_max=4)", unsure)
    assert [c.commit_step[~c.given].min() for c in (result, narrow)] == [1, 0]


@pytest.mark.parametrize("window", ["blocks(4)", "dsb(4)", "whole"])
@pytest.mark.parametrize("steps", [3, 5, 12])
def test_a_fixed_number_of_steps_in_any_window(window: str, steps: int) -> None:
    """As even as the window allows."""
    result = run(f"fixed(steps={steps})+{window}+eos(eos_policy=none)", hashed(1), 12)
    assert result.nfe == max(steps, 3 if window == "blocks(4)" else 1)


def test_a_canvas_settles_when_the_last_steps_agree() -> None:
    one, two, sure = np.zeros(2, np.int64), np.ones(2, np.int64), np.full(2, 0.25, np.float32)
    for times, expected in ((0, [1, 1, 1, 1, 1]), (1, [0, 0, 0, 0, 1]), (2, [0] * 5)):
        settled = Settled()
        steps = (one, two, one, two, two)
        assert [settled.settled(tokens, sure, times, 0.3) for tokens in steps] == expected
        assert settled.settled(two, sure, times, 0.3)
        assert len(settled.likeliest) == times  # no more is kept, however many steps there are
        assert not settled.settled(two, sure, times, 0.25)  # below, not at


@pytest.mark.parametrize(
    ("selection", "chosen"),
    [("lowest_maxprob", 1), ("lowest_current_prob", 0), ("lowest_log_margin", 2)],
)
def test_ddims_corrector_draws_the_least_sure_position_again(selection: str, chosen: int) -> None:
    """Of three positions one is least likely, one is least likely to be what it is, and one most
    wants to be another token; what stands second in the first says nothing."""
    part = DDIM(corrector_selection=selection, corrector_selection_tau=1e-6, vocab_size=8)
    canvas = canvas_of(3, noise=lambda stream, step, at: np.full(len(at), 0.5, np.float32))
    canvas.tokens[:] = [1, 2, 3]
    p: Any = SimpleNamespace(
        positions=np.arange(3), token=np.array([5, 6, 7]),
        top_token=np.array([[1, 0], [2, 0], [4, 0]]),
        top_logprob=np.log(np.array([[0.5, 0.001], [0.4, 0.3], [0.9, 0.05]])),
        asked={"held": np.log(np.array([[0.01], [0.4], [0.02]]))},
    )  # fmt: skip
    after = part._redrawn(canvas, p, 1.0)
    assert np.flatnonzero(after != canvas.tokens).tolist() == [chosen]


def test_steps_in_which_dreams_schedule_reveals_nothing_cost_no_forward() -> None:
    model, masks, steps = table_model(hashed(3)), 8, 24
    left, expected = masks, []
    for k, share in enumerate([*(transfer_rate(steps, 1e-3, k) for k in range(steps - 1)), 1]):
        if count := int(np.float32(left) * np.float32(share)):
            left, expected = left - count, [*expected, k]
    engine = Decoding(model, compose(f"dream(steps={steps})"), compose_cache("none"))
    done = [*engine.run([canvas_for(model, [1, 2, 3], masks)])]
    assert [step.number for [step] in done] == expected and 1 < len(expected) <= masks


@pytest.mark.parametrize("spec", ["llada", "remdm", "dream"])
def test_steps_beyond_counting_take_neither_memory_nor_time(spec: str) -> None:
    model = table_model(hashed(3))
    sampler = compose(spec, options={"steps": 2**31 - 1})
    engine = Decoding(model, sampler, compose_cache("none"))
    run = engine.run([canvas_for(model, [1, 2, 3], 4)])
    if spec == "dream":
        with pytest.raises(ConfigError, match="use fewer steps"):
            next(run)
    else:
        assert sum(len(step.decision.committed) for [step] in run) == 4
