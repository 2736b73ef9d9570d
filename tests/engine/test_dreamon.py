"""DreamOn: positions that become two, or none, against its rules in a plain loop."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.core.canvas import Canvas, Hole
from dllm.request.holes import Measured
from dllm.samplers.dreamon import DreamOn, Expansions

from ..golden.conftest import goldens_dir
from ..thin import covering

MASK = 255
# seed of the text around a hole of 8, ids that this model proposes there: they delete and expand
CASES = [(1, 180, 2), (2, 142, 169), (8, 74, 147), (3, 85, 108)]


def tiny(end: int = 250, expand: int | None = 251) -> dllm.DiffusionModel:
    facts: dict[str, Any] = {} if expand is None else {"expand_token_id": expand}
    return dllm.load(Path(goldens_dir()) / "dream-tiny", family="dreamon", eos_token_id=end,
                     stop_token_ids=(end,), **facts)  # fmt: skip


def around(seed: int) -> tuple[list[int], list[int]]:
    draw = np.random.default_rng(seed)
    return draw.integers(0, 130, 5).tolist(), draw.integers(0, 130, 3).tolist()


def by_the_rules(
    model: dllm.DiffusionModel, left: list[int], masks: int, right: list[int], most: int,
    to_right: bool,
) -> tuple[list[int], int]:  # fmt: skip
    """What stands in the hole in the end, and after how many forwards."""
    text, budget, forwards = [*left, *[MASK] * masks, *right], 5, 0
    end, expand = model.facts.eos_token_id, model.facts.expand_token_id
    while MASK in text:
        forwards += 1
        with torch.inference_mode():
            logits = model.hf(torch.tensor([text])).logits[0].double()
        logits = torch.cat([logits[:1], logits[:-1]])
        logits[:, MASK] = -torch.inf
        size = len(text) - len(left) - len(right)
        if size == most or not budget:
            logits[:, expand] = -torch.inf
        where = [i for i, token in enumerate(text) if token == MASK]
        p = logits.softmax(-1)[where]
        at = int((p * (p + 1e-30).log()).sum(-1).argmax())
        token = int(p[at].argmax())
        here = where[at]
        if token == expand:
            text[here : here + 1] = [MASK, MASK]
            budget -= 1
        elif token == end:
            gone = [i for i in where if i > here] if to_right else []
            text = [t for i, t in enumerate(text) if i != here and i not in gone]
        else:
            text[here] = token
    return text[len(left) : len(text) - len(right)], forwards


def begun(left: list[int], masks: int, right: list[int], *bounds: tuple[int, int]) -> Measured:
    """A text with a hole that has ``masks`` positions at first, and keeps within its bounds."""
    ids = np.array([*left, *[0] * masks, *right])
    where = (np.arange(len(ids)) >= len(left)) & (np.arange(len(ids)) < len(left) + masks)
    return Measured(ids, where, (masks,), bounds=bounds)


@pytest.mark.parametrize(("case", "to_right"), covering(CASES, [False, True]))
def test_the_published_rules(case: tuple[int, int, int], to_right: bool) -> None:
    seed, end, expand = case
    model, (left, right) = tiny(end, expand), around(seed)
    wanted, forwards = by_the_rules(model, left, 8, right, 14, to_right)
    sampler = f"dreamon(budget=5, delete_to_right={to_right})"
    result = dllm.infill(model, begun(left, 8, right, (0, 14)), sampler=sampler, trace=True)
    assert result.tokens == [*left, *wanted, *right] and result.nfe == forwards
    assert result.trace is not None
    edits = [edit for step in result.trace.steps for edit in step.edits]
    assert edits and {added for _, _, added, _ in edits} <= {0, 2}
    assert len(wanted) == 8 + sum(added - 1 for _, _, added, _ in edits)


def test_side_by_side_and_in_a_small_pool() -> None:
    """Rows of one session, with a cache and commits in parallel, are each row alone."""
    _, end, expand = CASES[1]
    model = tiny(end, expand)
    texts = [begun(left, 8, right, (2, 14)) for left, right in map(around, range(4))]
    how: dict[str, Any] = {"sampler": "threshold(tau=0.2)", "length": "dreamon"}
    for cache in ("none", "dual"):
        alone = [dllm.infill(model, text, cache=cache, **how) for text in texts]
        assert any(result.canvas != 8 for result in alone)
        assert all(2 <= len(result.tokens) - 8 <= 14 for result in alone)
        assert not any({end, expand, MASK} & {*result.tokens} for result in alone)
        with dllm.Session(model, cache=cache, max_batch_size=3, max_positions=70) as session:
            handles = [session.infill(text, **how) for text in texts]
            results = [handle.result(timeout=60) for handle in handles]
        assert [(r.tokens, r.nfe, r.computed) for r in results] == [
            (r.tokens, r.nfe, r.computed) for r in alone
        ]


def test_an_answer_of_its_own_length() -> None:
    """`generate`: streamed text stays, the answer keeps within its cap, "length" only there."""
    seed, end, expand = CASES[1]
    model, (prompt, _) = tiny(end, expand), around(seed)
    for cap in (12, 40):
        how: dict[str, Any] = {"sampler": "dreamon(initial=12)", "max_new_tokens": cap}
        result = dllm.generate(model, prompt, **how)
        seen = [token for event in dllm.stream(model, prompt, **how) for token in event.tokens]
        assert seen == result.tokens and len(seen) == result.canvas <= cap
        assert result.finish_reason == ("length" if result.canvas == cap else "stop")


def test_without_the_rule_nothing_is_asked_for() -> None:
    """A position that no rule would make two of is never proposed as one."""
    for seed, end, expand in CASES[:2]:
        left, right = around(seed)
        result = dllm.infill(tiny(end, expand), [*left, *[-1] * 8, *right], sampler="fixed(n=1)")
        assert expand not in result.tokens[5:13] and len(result.tokens) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampler": "threshold+append"}, "append lengthens an answer at its end"),
        ({"length": "dreamon", "sampler": "prob+llada"}, "llada plans for a text"),
        ({"length": "grow"}, "length of holes"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(dllm.DllmError, match=message):
        dllm.infill(tiny(), [5, -1, -1, 7], **arguments)


def test_a_model_without_the_token() -> None:
    with pytest.raises(dllm.DllmError, match="a token that asks for another mask"):
        dllm.generate("nano", "What is 2 + 3?", length="dreamon")
    with pytest.raises(dllm.DllmError, match="min_new_tokens does not go"):
        dllm.generate(tiny(), [5], length="dreamon", min_new_tokens=4)
    with pytest.raises(dllm.DllmError, match="expand_token_id 300 is outside"):
        tiny(expand=300)


def test_a_saved_model_is_of_its_family(tmp_path: Path) -> None:
    """Found by ``expand_token_id`` in config.json, in both layouts."""
    model = tiny(250, 251)
    for layout in ("native", "official"):
        model.save_pretrained(tmp_path / layout, layout=layout)
        again = dllm.load(tmp_path / layout)
        assert (again.family.name, again.facts.expand_token_id) == ("dreamon", 251)
    plain = dllm.load(Path(goldens_dir()) / "dream-tiny")
    assert (plain.family.name, plain.facts.expand_token_id) == ("dream", None)


def test_a_hole_that_is_full_is_so_for_itself() -> None:
    canvas = Canvas.for_prompt(np.arange(0), 12, mask_id=31, pad_id=30)
    canvas.holes = (Hole(1, 4, 3, 3), Hole(6, 9, 0, 9))
    part = DreamOn(eos_token_id=1, expand_token_id=2)
    at = np.arange(12)
    assert np.flatnonzero(part._full(canvas, at)).tolist() == [1, 2, 3]
    assert np.flatnonzero(part._fixed(canvas, at)).tolist() == [1, 2, 3]
    assert part._room(canvas) == 12  # as often as positions there may be
    for asked, full in ((11, [1, 2, 3]), (12, [*range(12)])):
        canvas.state(Expansions).count = asked
        assert np.flatnonzero(part._full(canvas, at)).tolist() == full


def test_the_last_place_of_a_hole_is_given_once() -> None:
    """Two positions ask for room in one step, of which there is one place."""
    canvas = Canvas.for_prompt(np.arange(0), 6, mask_id=31, pad_id=30)
    canvas.holes = (Hole(1, 4, 0, 4),)
    canvas.tokens[1:3] = 2
    view: Any = SimpleNamespace(canvas=canvas)
    edits = DreamOn(expand_token_id=2).resize(view, np.array([1, 2]))
    assert [(edit.at, edit.removed, edit.added) for edit in edits] == [(2, 1, 1), (1, 1, 2)]
    assert canvas.state(Expansions).count == 1
    canvas.holes, canvas.tokens[1] = (Hole(1, 4, 0, 3),), 3  # one that goes makes room
    edits = DreamOn(eos_token_id=3, expand_token_id=2, delete_to_right=False).resize(
        view, np.array([1, 2])
    )
    assert [(edit.at, edit.removed, edit.added) for edit in edits] == [(2, 1, 2), (1, 1, 0)]
