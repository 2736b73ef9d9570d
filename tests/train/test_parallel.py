"""The objective as a whole, on a network whose logits are a function of what it is fed."""

from dataclasses import replace

import pytest
import torch

from dllm.train.objectives.parallel import (
    PRESETS,
    Parallel,
    ParallelSettings,
    certainty,
    divergence,
)

MASK, PROMPT, LENGTH = 9, 3, 8


class Watched:
    """Remembers the texts that the student and the teacher were fed."""

    mask_id = MASK

    def __init__(self) -> None:
        self.fed: list[torch.Tensor] = []
        self.taught: list[tuple[torch.Tensor, torch.Tensor]] = []

    def logits(self, noisy: torch.Tensor, valid: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.fed.append(noisy)
        generator = torch.Generator().manual_seed(len(self.fed))
        return torch.randn(*noisy.shape, MASK + 1, generator=generator)

    def teacher_logits(self, ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        self.taught.append((ids, valid))
        generator = torch.Generator().manual_seed(77)
        return torch.randn(*ids.shape, MASK + 1, generator=generator)


def ran(
    settings: ParallelSettings, order: list[int], progress: float = 0.0, seed: int = 0,
    hint: torch.Tensor | None = None,
) -> tuple[Watched, float]:  # fmt: skip
    """The network, and the loss, of one text of 8 tokens behind a prompt of 3."""
    network = Watched()
    objective = Parallel(network, settings)  # type: ignore[arg-type]
    given = torch.tensor([[-1] * PROMPT + order])
    text = torch.arange(given.shape[1])[None] % MASK
    valid = torch.ones_like(given, dtype=torch.bool)
    loss = objective(text, given, valid, torch.tensor(progress), torch.tensor(seed), hint)["loss"]
    return network, float(loss)


def masks(noisy: torch.Tensor) -> list[int]:
    """Numbers of the answer's tokens that are masked."""
    return (noisy[0, PROMPT:] == MASK).nonzero()[:, 0].tolist()


def logits_of(view: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(view)
    return torch.randn(1, count, MASK + 1, generator=generator)[0]


@pytest.mark.parametrize("state", ["random", "order"])
def test_the_complement_is_the_rest_of_the_block(state: str) -> None:
    """Both views mask what lies behind the block; together they learn all of it, once.  The
    complement's entropy counts with dParallel's state, and not with d3LLM's."""
    settings = ParallelSettings(
        state, 0, kl=0.0, entropy=2.0, complement=True, block=4, ratio=(0.5, 0.5), scale=0.25
    )
    text = torch.arange(PROMPT + LENGTH) % MASK
    firsts = set()
    for seed in range(12):
        network, loss = ran(settings, [3, 1, 2, 0, 7, 5, 6, 4], seed=seed)
        one, other = map(masks, network.fed)
        low = 0 if len({*one, *other} & {0, 1, 2, 3}) else 4
        firsts.add(low)
        block, behind = set(range(low, low + 4)), set(range(low + 4, LENGTH))
        assert {*one} & {*other} == behind
        assert {*one} | {*other} == block | behind
        if state == "order":  # the half that was decided last
            assert {*one} & block == {low, low + 2}
        total = 0.0
        for view, masked in enumerate((one, other), 1):
            learnt = [PROMPT + i for i in masked if i in block]
            ce, entropy = certainty(
                logits_of(view, PROMPT + LENGTH)[learnt], text[learnt], settings.entropy_tau
            )
            weight = 2.0 if view == 1 or state == "random" else 0.0
            total += float(ce + weight * entropy)
        assert loss == pytest.approx(total / 4, rel=1e-5)
    assert firsts == {0, 4}


def test_the_share_that_is_masked_grows_over_the_run() -> None:
    settings = ParallelSettings("random", 0, kl=0.0, block=LENGTH, ratio=(0.0, 1.0))
    order = list(range(LENGTH))
    assert masks(ran(settings, order, 0.0)[0].fed[0]) == []
    assert len(masks(ran(settings, order, 1.0)[0].fed[0])) == LENGTH
    counts = [len(masks(ran(settings, order, 0.25, seed)[0].fed[0])) for seed in range(64)]
    assert 0.15 < sum(counts) / (64 * LENGTH) < 0.35  # 512 draws: a deviation is 0.02


def test_a_block_is_masked_between_what_the_run_has_reached_and_its_end() -> None:
    """d3LLM draws the share anew; what was decided last is masked."""
    settings = replace(PRESETS["d3llm"], block=LENGTH, ratio=(0.25, 0.75))
    order = list(range(LENGTH))
    for progress, least in ((0.0, 2), (0.5, 4), (1.0, 6)):
        found = [masks(ran(settings, order, progress, seed)[0].fed[0]) for seed in range(40)]
        assert all(one == order[-len(one) :] for one in found)
        assert {len(one) for one in found} == set(range(least + (least < 6), 7))


def test_the_teacher_sees_the_hint_and_teaches_what_stays_masked() -> None:
    """TAD: cross-entropy on what is decided within ``delta`` steps, divergence on the rest, at
    ``tau``; the teacher's rows are those of the text, behind its hint."""
    hint = torch.tensor([[-1, 5, 6]])
    settings = ParallelSettings(delta=2, ce=3.0, kl=0.5, tau=2.0)
    order = list(range(LENGTH))
    text, taught = torch.arange(PROMPT + LENGTH) % MASK, 0
    for seed in range(10):
        network, loss = ran(settings, order, seed=seed, hint=hint)
        masked = masks(network.fed[0])
        step = LENGTH - len(masked)
        assert masked == order[step:]
        soon, later = ([PROMPT + i for i in part] for part in (masked[:2], masked[2:]))
        ce, _ = certainty(logits_of(1, PROMPT + LENGTH)[soon], text[soon], 1.0)
        total = 3 * ce
        assert len(network.taught) == bool(later)  # where nothing is learnt from it, it is not run
        if later:
            ((ids, valid),) = network.taught
            assert ids[0].tolist() == [0, 5, 6, *network.fed[0][0].tolist()]
            assert valid[0].tolist() == [False] + [True] * (2 + PROMPT + LENGTH)
            rows = logits_of(77, 3 + PROMPT + LENGTH)[3:][later]
            total = total + 0.5 * divergence(logits_of(1, PROMPT + LENGTH)[later], rows, 2.0)
            taught += 1
        assert loss == pytest.approx(float(total), rel=1e-5)
    assert taught


def test_every_step_of_a_trajectory_is_drawn() -> None:
    """Of eight tokens decided one by one, one to eight are masked."""
    objective = Parallel(Watched(), ParallelSettings())  # type: ignore[arg-type]
    order = torch.tensor([[-1] * PROMPT + [*range(LENGTH)]] * 400)
    masked, _ = objective._state(order, 0.0, torch.Generator().manual_seed(0))
    assert set(masked.sum(1).tolist()) == {*range(1, LENGTH + 1)}
