"""The diffusion drafter: what it feeds, what it keeps, which row scores which position."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.cache.base import Slots
from dllm.core.canvas import Canvas
from dllm.drafting.base import Budget, DraftRequest
from dllm.drafting.drafters.diffusion import DiffusionDrafting, Refresh, Reuse
from dllm.eval.tasks import TASKS
from dllm.request.prompts import encode, encode_text

GOLDEN = Path(__file__).parents[2] / "golden" / "data"
PREFIX = np.array([20, 21, 22, 23, 24, 25])


@pytest.fixture(scope="module")
def dream() -> dllm.DiffusionModel:
    return dllm.load(GOLDEN / "dream-tiny")


def start(model: dllm.DiffusionModel, limit: int = 60, **how: Any) -> DiffusionDrafting:
    size = model.facts.vocab_size
    drafter = dllm.DiffusionDrafter(model, **({"window": 5} | how))
    opened = drafter.open(DraftRequest(PREFIX, size, (), limit))
    assert isinstance(opened, DiffusionDrafting)
    return opened


def log_q(drafting: DiffusionDrafting, prefix: np.ndarray) -> torch.Tensor:
    (result,) = drafting.part.marginals([(drafting, prefix, 0)])
    assert result is not None
    return result.log_q


@pytest.mark.parametrize("name", ["tiny", "dream"])
@pytest.mark.parametrize("marker", [None, 7])
def test_rows_score_the_positions_they_predict(
    name: str, marker: int | None, request: pytest.FixtureRequest
) -> None:
    """Against a plain forward over text, masks and marker; Dream's rows are shifted by one."""
    model: dllm.DiffusionModel = request.getfixturevalue(name)
    mask = model.facts.mask_token_id
    ids = [*PREFIX.tolist(), *[mask] * 5, *([] if marker is None else [marker])]
    with torch.inference_mode():
        logits = model.hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    first = len(PREFIX) - model.facts.logit_shift
    expected = logits[first : first + 5].clone()
    expected[:, mask] = -torch.inf
    result = log_q(start(model, end_marker=marker), PREFIX)
    assert torch.allclose(result, expected.log_softmax(-1), atol=1e-4)
    assert bool((result[:, mask] == -torch.inf).all())


def test_a_trained_drafter_knows_what_comes_next(nano: dllm.DiffusionModel) -> None:
    """Rows that predicted a neighbour of their position would be near chance."""
    wrong = replace(nano, facts=replace(nano.facts, logit_shift=1))
    right = dict.fromkeys(("as it is", "shifted"), 0)
    for example in TASKS["copy"].examples(10, 0):
        answer = encode_text(nano.tokenizer, example.answer)
        known = np.array([*encode(nano, example.prompt), *answer[:2]])
        for name, model in zip(right, (nano, wrong), strict=True):
            opened = dllm.DiffusionDrafter(model, search="argmax", window=8).open(
                DraftRequest(known, nano.facts.vocab_size, (0,), 120)
            )
            drafted = opened.propose(known, Budget(2, 2)).tokens.tolist()
            right[name] += drafted == answer[2:4]
    assert right["as it is"] >= 9
    assert right["shifted"] <= 1


@pytest.mark.parametrize("name", ["tiny", "dream"])
def test_refreshing_every_round_is_no_reuse(name: str, request: pytest.FixtureRequest) -> None:
    model: dllm.DiffusionModel = request.getfixturevalue(name)
    every, none = start(model, refresh_rounds=1), start(model, cache="none")
    prefix = PREFIX
    for token in (30, 31, 32):
        assert torch.allclose(log_q(every, prefix), log_q(none, prefix), atol=1e-4)
        prefix = np.append(prefix, [token, token + 5])


def computed(drafting: DiffusionDrafting) -> int:
    return drafting.row.canvas.computed


def test_only_masks_and_new_tokens_are_computed(tiny: dllm.DiffusionModel) -> None:
    drafting = start(tiny, refresh_rounds=4)
    prefix, sizes = PREFIX, []
    for _ in range(6):
        log_q(drafting, prefix)
        sizes.append(computed(drafting))
        prefix = np.append(prefix, [40, 41])
    assert sizes == [11, 7, 7, 7, 6 + 8 + 5, 7]


def test_a_changed_prefix_is_computed_again(tiny: dllm.DiffusionModel) -> None:
    """Everything from the first other token on: the result is that of a fresh start, up to what
    the first tokens saw."""
    drafting = start(tiny, refresh_rounds=100)
    log_q(drafting, PREFIX)
    other = PREFIX.copy()
    other[2] = 50
    log_q(drafting, other)
    assert computed(drafting) == len(PREFIX) - 2 + 5


def test_the_window_is_not_the_draft(tiny: dllm.DiffusionModel) -> None:
    drafting = start(tiny, window=12, search="argmax")
    assert len(drafting.propose(PREFIX, Budget(3, 20))) == 3
    assert drafting.row.canvas.length == len(PREFIX) + 12
    long = start(tiny, window=12, search="argmax")
    both = long.propose(PREFIX, Budget(12, 20))
    assert both.tokens[:3].tolist() == drafting.propose(PREFIX, Budget(3, 20)).tokens.tolist()


def test_longer_drafts_get_more_masks(nano: dllm.DiffusionModel) -> None:
    request = DraftRequest(np.arange(5, 12), nano.facts.vocab_size, (0,), 7 + 60)
    drafting = dllm.DiffusionDrafter(nano, search="argmax").open(request)
    assert len(drafting.propose(request.prompt, Budget(48, 60))) == 48
    assert (drafting.row.canvas.length, drafting.part.window) == (7 + 48, None)  # type: ignore[attr-defined]
    drafting.propose(request.prompt, Budget(4, 60))
    assert drafting.row.canvas.length == 7 + 32  # type: ignore[attr-defined]


def test_tokens_that_may_not_be_drafted_are_not_drafted(nano: dllm.DiffusionModel) -> None:
    prompt = encode(nano, "Compute 69 + 49.")
    request = DraftRequest(prompt, nano.facts.vocab_size, (0,), len(prompt) + 60)
    free = dllm.DiffusionDrafter(nano, search="argmax", window=8).open(request)
    banned = tuple(set(free.propose(prompt, Budget(8, 8)).tokens.tolist()))
    part = dllm.DiffusionDrafter(nano, search="argmax", window=8, banned=banned)
    opened: Any = part.open(request)
    (distributions,) = part.marginals([(opened, prompt, 0)])
    assert distributions is not None
    assert torch.allclose(distributions.log_q.exp().sum(1), torch.ones(8))
    assert not set(distributions.argmax.tolist()) & set(banned)


def test_the_window_ends_with_the_context(tiny: dllm.DiffusionModel) -> None:
    limit = tiny.facts.context_length
    drafting = start(tiny, limit=limit, search="argmax", window=16)
    near = np.resize(PREFIX, limit - 3)
    assert len(drafting.propose(near, Budget(9, 9))) == 3
    assert len(drafting.propose(np.resize(PREFIX, limit), Budget(9, 9))) == 0


def test_what_no_drafter_can_be(tiny: dllm.DiffusionModel) -> None:
    for how in ({"window": 0}, {"refresh_rounds": 0}, {"search": "nothing"},
                {"model": "none such"}):  # fmt: skip
        with pytest.raises(dllm.DllmError):
            dllm.DiffusionDrafter(**({"model": tiny} | how))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "drafter", ["nano", pytest.param(("prompt_lookup", "nano"), marks=pytest.mark.slow)]
)
def test_one_forward_drafts_for_all_texts(drafter: Any) -> None:
    """Texts, rounds and lengths are those of each alone; forwards those of the longest."""
    examples = [e.prompt for task in ("sort", "copy", "sum") for e in TASKS[task].examples(1, 0)]
    how: dict[str, Any] = {"max_new_tokens": 40, "controller": "fixed(k=6)", "max_batch_size": 4}
    verifier, model = dllm.load("nano-ar"), dllm.load("nano")
    calls: list[int] = []
    part = dllm.DiffusionDrafter(model) if drafter == "nano" else [drafter[0], model]
    handle = model.backbone.register_forward_hook(lambda *_: calls.append(1))
    try:
        together = dllm.speculate(verifier, part, examples, **how)
        forwards = len(calls)
        alone = [dllm.speculate(verifier, part, prompt, **how) for prompt in examples]
    finally:
        handle.remove()
    for one, other in zip(together, alone, strict=True):
        assert one.tokens == other.tokens
        assert [r.accepted for r in one.rounds] == [r.accepted for r in other.rounds]
    assert 0 < forwards < 0.6 * (len(calls) - forwards)
    if drafter == "nano":
        assert isinstance(part, dllm.DiffusionDrafter)
        assert part._engine is None, "keys and values are given back with the last text"


def test_the_end_marker_stands_behind_the_masks(tiny: dllm.DiffusionModel) -> None:
    drafting = start(tiny, end_marker=7)
    log_q(drafting, PREFIX)
    canvas, masks = drafting.row.canvas, len(PREFIX) + np.arange(5)
    assert canvas.tokens[-1] == 7 and canvas.end == canvas.length - 1 == masks[-1] + 1
    assert np.flatnonzero(canvas.masked).tolist() == masks.tolist()
    assert np.flatnonzero(~canvas.given).tolist() == masks.tolist()


def test_what_was_computed_for_a_former_draft_is_used_again() -> None:
    canvas, slots = Canvas.for_prompt(np.arange(4), 2, mask_id=9, pad_id=8), Slots.empty(6)
    slots.computed(np.arange(5), 0)
    slots.pending[1] = True
    plans = [Reuse().plan(canvas, slots, canvas.masks()) for _ in range(2)]
    slots.state(Refresh).due = True
    plans.append(Reuse().plan(canvas, slots, canvas.masks()))
    assert [plan.compute.tolist() for plan in plans] == [[1, 4, 5], [1, 4, 5], [*range(6)]]


def test_drafts_share_the_verifiers_noise_where_it_draws(tiny: dllm.DiffusionModel) -> None:
    drafter, size = dllm.DiffusionDrafter(tiny, window=5), tiny.facts.vocab_size
    found = []
    for temperature in (0.0, 0.5):
        opened = drafter.open(DraftRequest(PREFIX, size, (), 60, temperature))
        assert isinstance(opened, DiffusionDrafting)
        found.append(opened.search.name)
    assert found == ["cps", "coupled"]
