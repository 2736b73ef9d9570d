"""The loss of block drafters: weights, targets, gradients."""

import math
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from dllm.train.dflash.loss import FrozenHeadLoss, decay_weights, dpace_weights, sampled_rows
from dllm.train.dflash.model import drafter_config, new_drafter
from dllm.train.dflash.objective import Objective, Trainee

from .test_dflash import shape


def test_decay_is_exponential() -> None:
    counted = torch.tensor([[True, True, False]])
    weights = decay_weights(counted, 4.0)
    assert weights.tolist() == [[1.0, pytest.approx(math.exp(-0.25)), 0.0]]


def test_dpace_sums_the_probabilities_of_getting_there() -> None:
    q = [0.9, 0.2, 0.6]
    s = [0.5 * value + 0.5 for value in q]
    reached = [s[0], s[0] * s[1], s[0] * s[1] * s[2]]
    expected = [sum(reached), sum(reached[1:]), reached[2]]
    got = dpace_weights(torch.tensor([q, q]), torch.tensor([[True] * 3, [True, True, False]]))
    assert got[0].tolist() == pytest.approx(expected)
    assert got[1].tolist() == pytest.approx([reached[0] + reached[1], reached[1], 0.0])


@pytest.mark.parametrize("soft", [0.0, 0.3, 1.0])
def test_the_loss_has_the_gradient_that_autograd_finds(soft: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    head, teacher = torch.randn(11, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    labels, weights = torch.randint(0, 11, (7,)), torch.rand(7, dtype=torch.float64)
    log_q = (hidden @ head.T).log_softmax(-1)
    p = (teacher @ head.T).softmax(-1)
    hard = -log_q[range(7), labels]
    expected = (1 - soft) * hard - soft * (p * log_q).sum(-1)
    (slope,) = torch.autograd.grad((expected * weights).sum(), hidden)
    losses, q = FrozenHeadLoss.apply(hidden, head, labels, teacher, soft, 3)
    torch.testing.assert_close(losses.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(q.double(), hard.neg().exp(), atol=1e-5, rtol=1e-5)
    (got,) = torch.autograd.grad((losses * weights).sum(), hidden)
    torch.testing.assert_close(got, slope, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("network", "config", "own"),
    [
        (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 3.0}),
        (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 8.0}),
        (LlamaForCausalLM, LlamaConfig, {}),
    ],
)  # fmt: skip
def test_the_target_is_the_verifiers_distribution(network: Any, config: Any, own: Any) -> None:
    """Granite scales the logits of its head, and Gemma 2 caps them."""
    torch.manual_seed(0)
    hf = network(config(**{**shape().to_diff_dict(), "num_hidden_layers": 3, **own})).eval()
    drafter = new_drafter(drafter_config(hf.config, layers=1, block_size=2, mask_token_id=3))
    trainee = Trainee(drafter, hf, Objective(soft=1.0), torch.arange(50))
    ids, at = torch.randint(4, 50, (1, 9)), torch.tensor([[6]])
    states = trainee.reader.read(ids)
    log_q = (trainee.blocks(ids, states[..., :-32], at)[0, 0] @ trainee.head.T).log_softmax(-1)
    expected = -(hf(ids).logits[0, 6].softmax(-1) * log_q).sum()
    got = trainee(ids, torch.tensor([9]), at, torch.tensor(0), states)["loss"]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_every_label_has_a_row_in_a_steps_head() -> None:
    labels = torch.tensor([7, 30, 7, 49])
    rows, index = sampled_rows(labels, torch.tensor([2, 7]), 50, 5, torch.Generator())
    assert rows[index].tolist() == labels.tolist()
    assert {2, 7} <= set(rows.tolist())
    assert len(set(rows.tolist())) == len(rows) <= 9
