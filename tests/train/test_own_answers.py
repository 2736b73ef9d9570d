"""What a model's own answers become as training data, and the objectives that learn from them."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dllm
from dllm.core.errors import ConfigError
from dllm.train.dflash.generate import read_data
from dllm.train.loop import Schedule
from dllm.train.network import Network
from dllm.train.objectives.blocks import Blocks, BlockSettings
from dllm.train.objectives.parallel import NEVER, PRESETS, Parallel
from dllm.train.recipes.convert import in_blocks
from dllm.train.recipes.distill import Distillation, train
from dllm.train.trajectories import (
    Batches,
    Question,
    Trajectory,
    greedy,
    read_trajectories,
    task_questions,
    write_answers,
    write_trajectories,
)
from examples.nano.tokenizer import build_tokenizer

pytestmark = pytest.mark.filterwarnings("default")
MASK = 3


def tiny(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.3, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    ))  # fmt: skip


def test_conversations_to_be_answered(tmp_path: Path) -> None:
    """With their tools; one that is answered already is named by line."""
    tokenizer: Any = build_tokenizer()
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    )
    model = replace(dllm.load("nano-ar"), tokenizer=tokenizer)
    user, tool = {"role": "user", "content": "Tom"}, {"role": "tool", "content": "9"}
    call = {"role": "assistant", "content": "", "tool_calls": []}
    named = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    lines = [{"messages": [user, call, tool], "tools": named}, {"messages": [user]},
             {"messages": [user, {"role": "assistant", "content": "Ben"}]}]  # fmt: skip
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, lines[:2])))
    texts = [tokenizer.decode(ids) for ids in read_data(model, file) or ()]
    assert texts == ["add user Tom assistant  tool 9 ", "user Tom "]
    file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigError, match=r"line 3: .*leave that out"):
        read_data(model, file)


def test_tokens_that_were_never_decided_are_masked_and_not_learnt() -> None:
    answers = [Trajectory((9, 9, 5, 6, 1, 1), 2, (1, 0, 2, -1))] * 2
    batch = Batches(answers, 2, 1, seed=0)[0]
    assert batch["order"].tolist() == [[-1, -1, 1, 0, 2, NEVER]] * 2
    network = Network(dllm.load(tiny(), mask_token_id=MASK, family="llada"))
    for name in PRESETS:
        states = [
            Parallel(network, PRESETS[name])._state(
                batch["order"], 0.5, torch.Generator().manual_seed(seed)
            )
            for seed in range(8)
        ]
        assert not any(learnt[:, [0, 1, 5]].any() for _, learnt in states)
        assert not any(masked[:, :2].any() for masked, _ in states)
        assert all(masked[:, 5].all() for masked, _ in states)


def test_a_teacher_with_a_reference_sees_the_blocks_that_the_student_sees() -> None:
    """Behind hints of any length, and beside other rows, each as if it were alone."""
    student = in_blocks(dllm.load(tiny(), eos_token_id=1), 4, MASK)
    network, draw = Network(student), torch.Generator().manual_seed(0)

    def texts(*lengths: int) -> list[tuple[int, ...]]:
        ids = [torch.randint(5, 60, (n,), generator=draw).tolist() for n in lengths]
        return [tuple(row) for row in ids]

    answers = [Trajectory(ids, 3, (0,) * (len(ids) - 3)) for ids in texts(9, 14, 18)]
    batch = Batches(answers, 3, 1, 0, ([9, 10], [11]), 4)[0]
    ids, valid, hint = batch["ids"], batch["valid"], batch["hint"]
    together = torch.cat([hint.clamp_min(0), ids], 1), torch.cat([hint >= 0, valid], 1)
    logits = network.teacher_logits(*together)
    hf: Any = student.hf
    for row in range(3):
        shown, text = hint[row][hint[row] >= 0], ids[row][valid[row]]
        places = torch.arange(len(shown) + len(text)) + -len(shown) % 4  # where blocks begin
        seen = torch.where(places[:, None] // 4 >= places // 4, 0.0, -torch.inf)[None, None]
        alone = hf(torch.cat([shown, text])[None], attention_mask=seen, position_ids=places[None])
        got = logits[row, hint.shape[1] :][valid[row]]
        torch.testing.assert_close(got, alone.logits[0, len(shown) :], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_of_several_answers_the_fastest_right_one_is_kept(tmp_path: Path) -> None:
    model, how = dllm.load("nano"), {"sampler": "threshold(0.9)", "temperature": 1.0}
    asked = task_questions(3, 3, ("remove_random",))
    assert [*write_trajectories(model, asked, tmp_path / "some.jsonl", samples=3, **how)] == [3]
    kept = {tuple(t.ids[: t.start]): max(t.order) + 1
            for t in read_trajectories(tmp_path / "some.jsonl")}  # fmt: skip
    prompts = [q.prompt for q in asked for _ in range(3)]
    results = dllm.generate(model, prompts, seed=0, **how)
    fewest: dict[tuple[int, ...], int] = {}
    for number, result in enumerate(results):
        if asked[number // 3].right(result.text):
            prompt = tuple(result.sequences[: result.prompt_length].tolist())
            fewest[prompt] = min(result.nfe, fewest.get(prompt, 99))
    assert kept == fewest and len(kept) > 1


def test_what_a_killed_run_has_half_written_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dllm.train.trajectories.PIECE", 2)
    model, asked = dllm.load("nano"), task_questions(3, 3, ("remove_random",))
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    assert [*write_trajectories(model, asked, whole)] == [2, 3]
    assert next(iter(write_trajectories(model, asked, killed))) == 2
    with killed.open("a") as file:
        file.write(whole.read_text().splitlines()[-1] + '\n{"ids": [1, ')
    assert [*write_trajectories(model, asked, killed)] == [3]
    assert killed.read_text() == whole.read_text()
    killed.unlink()  # by its user, who leaves the note of how far it was
    assert [*write_trajectories(model, asked, killed)] == [2, 3]
    assert killed.read_text() == whole.read_text()
    with pytest.raises(ConfigError, match="answers other prompts"):
        next(iter(write_trajectories(model, asked[::-1], killed)))


@pytest.mark.parametrize("step", ["true", NEVER, 10**20, "NaN"])
def test_a_step_that_is_none_is_told(step: Any, tmp_path: Path) -> None:
    """One of 32,768 and more meant that the token was never decided."""
    file = tmp_path / "answers.jsonl"
    file.write_text(f'{{"ids": [5, 6], "answer": 1, "order": [{step}]}}')
    with pytest.raises(ConfigError, match=r"line 1: .*a step is a whole number below 32768"):
        read_trajectories(file)


@pytest.mark.parametrize("content", [b"64 x", b"", b"\xff"])
def test_a_damaged_count_of_answers_is_told(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.with_suffix(".done").write_bytes(content)
    with pytest.raises(ConfigError, match=r"answers\.done is damaged: delete it and answers"):
        [*write_trajectories(dllm.load("nano"), [Question("Copy: a")], file)]


def test_blocks_learn_what_the_causal_model_says_of_each_token() -> None:
    """Against one forward per block: clean text before it, its own masks, and nothing behind."""
    base = dllm.load(tiny(), eos_token_id=1)
    student = in_blocks(base, 4, MASK)
    assert student.facts.block_length == 4 and student.facts.logit_shift == 0
    assert base.facts.mask_kind == "causal"
    objective = Blocks(Network(student, teacher=base), BlockSettings())
    ids = torch.randint(5, 60, (2, 14))
    order = torch.where(torch.arange(14) < 3, -1, 0).expand(2, -1)
    seen: dict[str, Any] = {}
    logits = objective.network.logits

    def spy(noisy: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen["noisy"] = noisy
        return logits(noisy, *rest)

    objective.network.logits = spy  # type: ignore[method-assign]
    valid = torch.ones_like(ids, dtype=torch.bool)
    loss = objective(ids, order, valid, torch.tensor(0.0), torch.tensor(5))["loss"]
    assert loss.requires_grad
    noisy, terms = seen["noisy"], []
    hf: Any = student.hf
    for row in range(2):
        causal = base.hf(ids[row : row + 1]).logits[0].log_softmax(-1)
        for first in range(0, 14, 4):
            part = torch.cat([ids[row, :first], noisy[row, first : first + 4]])[None]
            mask = objective_mask(part.shape[1])
            own = hf(part, attention_mask=mask).logits[0].log_softmax(-1)
            for place in range(first, min(first + 4, 14)):
                if noisy[row, place] == MASK:
                    p, q = causal[place - 1], own[place]
                    terms.append((p.exp() * (p - q)).sum())
    assert len(terms) > 4
    torch.testing.assert_close(loss, torch.stack(terms).mean(), atol=1e-5, rtol=1e-4)


def objective_mask(length: int) -> torch.Tensor:
    """(1, 1, L, L) additive: blocks of 4 see themselves and what is before them."""
    own = torch.arange(length) // 4
    return torch.where(own[:, None] >= own, 0.0, -torch.inf)[None, None]


def test_answers_of_a_causal_model_end_with_a_block(tmp_path: Path) -> None:
    model, asked = dllm.load("nano-ar"), task_questions(4, 0, ("copy",))
    assert [*write_answers(model, asked, tmp_path / "a.jsonl", 4)] == [4]
    for line in (tmp_path / "a.jsonl").read_text().splitlines():
        entry = json.loads(line)
        assert len(entry["ids"]) % 4 == 0
        assert len(entry["ids"]) == entry["answer"] + len(entry["order"])
        ended = [i for i, step in zip(entry["ids"][entry["answer"] :], entry["order"], strict=True)
                 if step >= 0]  # fmt: skip
        assert ended[-1] == model.facts.eos_token_id


def test_answers_are_greedy_whatever_a_model_recommends() -> None:
    model = dllm.load("nano-ar")
    hot = replace(model, generation_defaults={**model.generation_defaults, "temperature": 1.9})
    asked = ["What is 4 + 5?", "Sort this list: Zoe, Ben, Mia"]
    assert [*greedy(hot, None, asked, 32)] == [*greedy(model, None, asked, 32)]


def test_answers_of_a_causal_model_end_with_the_context(tmp_path: Path) -> None:
    """They are shorter behind a prompt that leaves room for fewer."""
    prompt = "Copy: " + ", ".join(["Tom"] * 45)
    assert [*write_answers(dllm.load("nano-ar"), [Question(prompt)], tmp_path / "a.jsonl")] == [1]
    entry = json.loads((tmp_path / "a.jsonl").read_text())
    assert 0 < len(entry["order"]) < 64 and len(entry["ids"]) <= 128


@pytest.mark.slow
def test_rounds_go_on_where_they_were(tmp_path: Path) -> None:
    model = dllm.load(tiny(), mask_token_id=MASK, family="llada", eos_token_id=1)
    model = replace(model, generation_defaults={"max_new_tokens": 8})
    recipe = Distillation(
        PRESETS["dparallel"], Schedule(1, 1e-3, 0, "constant", 0), rows=2, rounds=2
    )

    def asked(number: int) -> list[Question]:
        return [Question(list(range(5 + number, 12 + i))) for i in range(4)]

    def stopping(number: int) -> list[Question]:
        if number:
            raise InterruptedError
        return asked(number)

    whole = train(model, recipe, tmp_path / "whole", asked)
    with pytest.raises(InterruptedError):
        train(model, recipe, tmp_path / "parts", stopping)
    parts = train(model, recipe, tmp_path / "parts", asked)
    one, other = (run.model.network.hf.state_dict() for run in (whole, parts))
    before: Any = model.hf.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], before["lm_head.weight"])
    with pytest.raises(ConfigError, match="another recipe"):
        train(model, replace(recipe, rounds=3), tmp_path / "parts", asked)


def test_what_cannot_be_trained_answers_nothing(noisy: dllm.DiffusionModel, tmp_path: Path) -> None:
    def asked(number: int) -> list[Question]:
        raise AssertionError("hours later")

    with pytest.raises(ConfigError, match="counts its blocks"):
        train(noisy, Distillation(PRESETS["tad"]), tmp_path / "run", asked)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 4])
def test_a_model_with_an_adapter_is_not_trained(rank: int, tmp_path: Path) -> None:
    """It would be that adapter, of its own rank, or weights that cannot be written."""
    model = dllm.load(tiny(), mask_token_id=MASK, family="llada")
    Network(model, 2)
    with pytest.raises(ConfigError, match="has an adapter already: load it anew"):
        train(model, Distillation(PRESETS["tad"], rank=rank), tmp_path, lambda number: [])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_adapter_is_trained_beside_weights_of_16_bits(dtype: str) -> None:
    """Without autocast, in a family that rotates in float32."""
    model = dllm.load("nano", dtype=dtype)
    hf: Any = model.hf
    ids = torch.randint(5, 500, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = hf(input_ids=ids).logits.float()
    logits = Network(model, 2).logits(ids)
    torch.testing.assert_close(logits, expected, atol=0.2, rtol=0.0)  # bfloat16 has 8 bits
    logits.sum().backward()
    assert any(p.grad is not None for p in hf.parameters())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("rank", [0, 2])
def test_activations_that_are_computed_again_give_the_same_gradients(
    rank: int, tiny: dllm.DiffusionModel
) -> None:
    """In a network with fewer heads of keys than of queries, which others attend to in others."""
    ids, found = torch.arange(5, 29).view(2, 12), []
    valid = torch.arange(12) < torch.tensor([[12], [9]])
    for again in (False, True):
        torch.manual_seed(0)
        network = Network(replace(tiny, hf=copy.deepcopy(tiny.hf)), rank)
        if again:
            network.recompute()
        network.train()
        network.logits(ids, valid).square().sum().backward()
        found.append([p.grad for p in network.hf.parameters() if p.grad is not None])
    assert found[0] and all(map(torch.equal, *found))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
def test_a_run_that_computes_activations_again_ends_with_the_same_weights(
    tiny: dllm.DiffusionModel, tmp_path: Path
) -> None:
    recipe = Distillation(PRESETS["dparallel"], Schedule(1, 1e-3, 0, "constant", 0), rows=4)
    asked, made = [[5, 6, 7], [5, 6, 7, 8, 9], [8], [9, 7]], []
    for again in (False, True):
        model = replace(tiny, hf=copy.deepcopy(tiny.hf), generation_defaults={"max_new_tokens": 8})
        run = train(model, recipe, tmp_path / str(again), lambda _: [*map(Question, asked)],
                    gradient_checkpointing=again)  # fmt: skip
        assert run is not None and run.model.network.hf.is_gradient_checkpointing == again
        made.append(run.model.network.hf.state_dict())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_a_diffusion_model_has_no_blocks_to_learn() -> None:
    with pytest.raises(ConfigError, match="autoregressive Llama, Qwen2 or Qwen3"):
        in_blocks(dllm.load("nano"), 4, None)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@torch.inference_mode()
def test_steps_are_enough_to_compute_the_log_probabilities_again(temperature: float) -> None:
    """As a trainer elsewhere does it: the text as it stood before a step, one forward."""
    model = dllm.load("nano")
    result = dllm.generate(model, "Remove any item: Tom, Anna, Ben", temperature=temperature,
                           seed=4, sampler="threshold(0.9)", trace=True)  # fmt: skip
    ids, start = torch.from_numpy(result.sequences), result.prompt_length
    masked, seen = torch.arange(len(ids)) >= start, 0
    assert result.trace is not None
    for number, step in enumerate(result.trace.steps):
        state = torch.where(masked, model.facts.mask_token_id, ids)
        logits: Any = model.hf(state[None]).logits
        log_p = logits[0].float().log_softmax(-1)
        for position, token, _ in step.commits:
            masked[position], place = False, position - start
            if place < len(result.tokens):
                assert (token, number) == (result.tokens[place], result.order[place])
                assert log_p[position, token].item() == pytest.approx(
                    result.logprobs[place], abs=1e-4
                )
                seen += 1
    assert seen == len(result.tokens)
