"""The distillation losses against those that official code computed, with all their draws.

Recorded from czg1225/dParallel, hao-ai-lab/d3LLM and BHmingyang/TAD on tiny random
checkpoints (tests/golden/data/losses).
"""

from functools import cache
from typing import Any

import pytest
import torch

import dllm
from dllm.train.network import Network
from dllm.train.objectives.parallel import (
    block_state,
    certainty,
    divergence,
    last_decided,
    trajectory_state,
)

from ..golden.conftest import goldens_dir
from ..golden.recorded import recorded

MASK = 255


def cases(algorithm: str) -> list[Any]:
    return [pytest.param(*p.values, id=p.id) for p in recorded(algorithm)]


@cache
def network(name: str) -> Network:
    return Network(dllm.load(goldens_dir() / name, dtype="float32"))


@pytest.fixture
def llada(case: dict[str, Any]) -> Network:
    return network(case["model"])


def rows(case: dict[str, Any], name: str) -> torch.Tensor:
    """(B, L) bool of lists of positions."""
    result = torch.zeros(len(case["input_ids"]), len(case["input_ids"][0]), dtype=torch.bool)
    for row, positions in zip(result, case[name], strict=True):
        row[positions] = True
    return result


def places(case: dict[str, Any]) -> torch.Tensor:
    prompts = torch.tensor(case["prompt_lengths"])[:, None]
    return (torch.arange(len(case["input_ids"][0])) - prompts).clamp_min(-1)


def first_of_block(case: dict[str, Any]) -> torch.Tensor:
    drawn = [draw[3] for draw in case["draws"] if draw[0] == "randint"]
    return torch.tensor(drawn) * case["block_size"]


def close(value: torch.Tensor, recorded: float) -> None:
    assert value.item() == pytest.approx(recorded, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", cases("dparallel"))
def test_dparallel(case: dict[str, Any], llada: Network) -> None:
    ids, total = torch.tensor(case["input_ids"]), torch.zeros(())
    for view, part in (("noisy", "masked"), ("noisy_complement", "masked_complement")):
        learnt = rows(case, part)
        suffix = "_complement" if "complement" in view else ""
        masked, here = block_state(places(case), first_of_block(case), case["block_size"], learnt)
        assert torch.equal(here, learnt)
        noisy = torch.where(masked, MASK, ids)
        assert noisy.tolist() == case[view]
        logits = llada.logits(noisy)[learnt]
        ce, entropy = certainty(logits, ids[learnt], case["temperature"])
        close(ce, case["ce" + suffix])
        close(entropy, case["entropy" + suffix])
        total = total + ce + case["entropy_weight"] * entropy
    close(total, case["loss"])


@pytest.mark.parametrize("case", cases("d3llm"))
def test_d3llm(case: dict[str, Any], llada: Network) -> None:
    ids, learnt = torch.tensor(case["input_ids"]), rows(case, "masked")
    first, size = first_of_block(case), case["block_size"]
    for row, states in enumerate(case["trajectory"]):
        if states:  # else the masks are random draws
            order = (torch.tensor(states) == MASK).sum(0) - 1
            _, block = block_state(places(case), first, size, torch.ones_like(learnt))
            drawn = last_decided(order[None], block[row : row + 1], case["mask_ratio"])
            assert torch.equal(drawn[0], learnt[row])
    full = torch.arange(ids.shape[1]) < torch.tensor(case["full_lengths"])[:, None]
    masked, _ = block_state(places(case), first, size, learnt)
    noisy = torch.where(masked & full | learnt, MASK, ids)
    assert torch.equal(noisy[full], torch.tensor(case["noisy"])[full])
    logits = llada.logits(torch.tensor(case["noisy"]))[learnt]
    ce, entropy = certainty(logits, ids[learnt], case["temperature"])
    close(ce, case["ce"])
    close(entropy, case["entropy"])
    total = ce + case["entropy_weight"] * entropy
    if case["complementary"]:  # of the second view only what is likeliest is learnt
        assert case["noisy_complement"] is not None
        other = rows(case, "masked_complement")
        noisy = torch.tensor(case["noisy_complement"])
        again, _ = certainty(llada.logits(noisy)[other], ids[other], case["temperature"])
        close(again, case["ce_complement"])
        total = total + again
    close(total / 4, case["loss"])


@pytest.mark.parametrize("case", cases("tad"))
def test_tad(case: dict[str, Any], llada: Network) -> None:
    students, teachers = case["student_ids"], case["teacher_ids"]
    ce, kl = [], []
    for row, record in enumerate(case["records"]):
        states = torch.tensor([*record["trajectory"].values()])
        order = (states == MASK).sum(0) - 1
        step = torch.tensor([case["step"][row]])
        masked, soon = trajectory_state(order[None], step, case["delta"])
        prompt = len(students[row]) - states.shape[1]
        assert (prompt + masked[0].nonzero()[:, 0]).tolist() == sorted(
            case["ce_positions"][row] + case["kl_positions_student"][row]
        )
        learnt, later = soon[0], (masked & ~soon)[0]
        assert (prompt + learnt.nonzero()[:, 0]).tolist() == case["ce_positions"][row]
        logits = llada.logits(torch.tensor([students[row]]))[0, prompt:]
        teacher = llada.teacher_logits(torch.tensor([teachers[row]]))[0, -states.shape[1] :]
        ce.append((logits[learnt], states[-1][learnt]))
        kl.append((logits[later], teacher[later]))
    logits, labels = (torch.cat(part) for part in zip(*ce, strict=True))
    student, teacher = (torch.cat(part) for part in zip(*kl, strict=True))
    (entropy_free, _), kl_loss = (
        certainty(logits, labels, 1.0),
        divergence(student, teacher, case["tau"]),
    )
    close(entropy_free, case["ce"])
    close(kl_loss, case["kl"])
    close(case["lambda_ce"] * entropy_free + case["lambda_kl"] * kl_loss, case["loss"])
