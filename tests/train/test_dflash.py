"""Training of block drafters: masks, data, a whole small run."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MuseGlimmerAssistantModel,
)
from transformers.cache_utils import DFlashCache

import dllm
from dllm.core.errors import ConfigError
from dllm.drafting.dflash.checkpoint import BlockCheckpoint, load_checkpoint
from dllm.drafting.dflash.drafter import Binding
from dllm.drafting.dflash.drafter import BlockDrafter as BlockDrafterAtWork
from dllm.drafting.dflash.heads import head_of
from dllm.drafting.dflash.walks import candidates
from dllm.models.forwards import CACHE
from dllm.train.dflash import data
from dllm.train.dflash.card import curve, table
from dllm.train.dflash.evaluate import acceptance, matches, walk
from dllm.train.dflash.generate import write_answers
from dllm.train.dflash.model import (
    BlockDrafter,
    default_target_layer_ids,
    drafter_config,
    new_drafter,
)
from dllm.train.dflash.objective import Objective, Reader, Trainee
from dllm.train.dflash.recipe import DFlashTraining, Schedule, begun, finish, keep_states, start
from dllm.train.loop import resume
from dllm.train.trajectories import task_questions

pytestmark = pytest.mark.filterwarnings("default")


def shape(**more: Any) -> LlamaConfig:
    return LlamaConfig(**{
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    } | more)  # fmt: skip


def test_the_rotation_is_that_of_the_layers_that_see_everything() -> None:
    """Gemma 3 has one per kind of layer."""
    verifier = Gemma3TextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    rope = drafter_config(verifier, layers=2, mask_token_id=3).rope_parameters
    assert rope == verifier.rope_parameters["full_attention"]


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [(36, 5, [1, 9, 17, 25, 33]), (24, 5, [1, 6, 11, 16, 21]), (30, 4, [1, 10, 18, 27]),
     (30, 1, [15])],
)  # fmt: skip
def test_layers_to_read_are_those_of_the_paper(
    layers: int, count: int, expected: list[int]
) -> None:
    assert default_target_layer_ids(layers, count) == expected


@pytest.mark.parametrize("window", [None, 6])
def test_blocks_in_one_forward_are_the_blocks_that_transformers_drafts(window: int | None) -> None:
    torch.manual_seed(0)
    config = drafter_config(shape(), layers=2, block_size=4, mask_token_id=3, sliding_window=window)
    drafter = new_drafter(config)
    native = MuseGlimmerAssistantModel(copy.deepcopy(config)).eval()
    native.set_attn_implementation("sdpa")
    native.load_state_dict(drafter.state_dict())
    embedding = torch.randn(50, 32)
    ids, states = torch.randint(4, 50, (2, 14)), torch.randn(2, 14, 64)
    anchors = torch.tensor([[3, 9, 11], [5, 6, 12]])
    with torch.no_grad():
        together = BlockDrafter(drafter, embedding)(ids, states, anchors)
        for b, row in enumerate(anchors.tolist()):
            for n, anchor in enumerate(row):
                block = torch.tensor([[int(ids[b, anchor]), 3, 3, 3]])
                cache = DFlashCache(config=config)
                cache.activate_past_recording()
                cache.set_previous_accepted_tokens(anchor)
                alone = native(
                    noise_embeds=embedding[block], context_hidden_states=states[b : b + 1, :anchor],
                    position_ids=torch.arange(anchor + 4)[None], **{CACHE: cache},
                ).last_hidden_state  # fmt: skip
                torch.testing.assert_close(together[b, n], alone[0, 1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("normed", [False, True])
def test_blocks_are_embedded_in_training_as_when_drafting(normed: bool) -> None:
    """Gemma scales its embeddings; a norm behind them is left out, as transformers drafts."""
    torch.manual_seed(0)
    hf: Any = Gemma3ForCausalLM(Gemma3TextConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=6, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )).eval()  # fmt: skip
    if normed:
        hf.set_input_embeddings(torch.nn.Embedding(50, 32))
        hf.get_input_embeddings().embed_norm = torch.nn.Identity()
        hf.get_input_embeddings().register_forward_hook(lambda *inputs: 9.0 * inputs[-1])
    config = drafter_config(hf.config, layers=1, block_size=4, mask_token_id=3)
    drafter = new_drafter(config)
    ids, anchor = torch.randint(4, 50, (1, 14)), 9
    trainee = Trainee(drafter, hf, Objective(), torch.arange(4))
    states = torch.randn(1, 14, 32)
    together = trainee.blocks(ids, states, torch.tensor([[anchor]]))
    weights = {name: t.detach() for name, t in drafter.state_dict().items()}
    bound = Binding(BlockCheckpoint("", config, weights), hf)
    text = bound.network.new_text()
    bound.network.read(text, states[0, :anchor])
    one: Any = SimpleNamespace(anchor=int(ids[0, anchor]), text=text)
    torch.testing.assert_close(bound.block([one])[0], together[0].detach(), atol=1e-4, rtol=1e-4)


def test_a_prompt_is_held_out_whatever_its_answer() -> None:
    prompts = [tuple(range(i, i + 5)) for i in range(400)]
    out = [data.Answer((*p, 1), 5).held_out(8) for p in prompts]
    assert [data.Answer((*p, 2, 3), 5).held_out(8) for p in prompts] == out
    assert 25 < sum(out) < 80


@pytest.mark.parametrize(
    ("ids", "expected"),
    [(list(range(40)), False), ([1, 2, 3] * 20, True), ([1, 2] * 3, False)],
)
def test_loops_are_recognised(ids: list[int], expected: bool) -> None:
    assert data.loops(ids) is expected


def test_batches_are_a_function_of_seed_and_number(tmp_path: Path) -> None:
    answers = [data.Answer(tuple(range(4, 10 + i)), 6) for i in range(9)]
    states = data.HiddenStates([0], 2)
    one = data.Batches(answers, 2, 3, 5, 20, states)
    other = data.Batches(answers, 2, 3, 5, 20, states)
    for i in (7, 0, 19, 7):
        assert all(torch.equal(one[i][k], other[i][k]) for k in one[i])
    assert any(not torch.equal(one[0]["anchors"], one[i]["anchors"]) for i in range(1, 4))
    for i in range(8):  # two epochs: an anchor and at least one label lie in the answer
        anchors, length = one[i]["anchors"], one[i]["length"]
        inside = (anchors >= 6) & (anchors < length[:, None] - 1)
        assert bool((inside | (anchors == -1)).all())


def test_lines_of_another_form_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"ids": [1, 2], "answer": 1}\n{"text": "no"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        list(data.read_answers(file))


@pytest.mark.parametrize(
    ("content", "why"),
    [(b'{"ids": [1], "answer": 0}\n"\xff"\n', "utf-8"), (b"[" * 100_000, "line 1 of"),
     (b"\n", "holds no answers")],
)  # fmt: skip
def test_files_that_hold_no_answers_are_refused(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        list(data.read_answers(file))


def test_blank_lines_and_byte_order_marks_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"ids": [1, 2], "answer": 1}\n\n')
    assert [answer.ids for answer in data.read_answers(file)] == [(1, 2)]


def test_kept_hidden_states_are_those_of_the_answers_and_the_verifier(
    verifier: dllm.DiffusionModel, tmp_path: Path
) -> None:
    file, layers = tmp_path / "x.jsonl", [1, 3]
    hf: Any = verifier.hf

    def kept(hf: Any) -> list[int]:
        return [*data.write_states(file, Reader(hf, layers), layers)]

    def write(*answers: list[int]) -> None:
        file.write_text("".join(json.dumps({"ids": ids, "answer": 2}) + "\n" for ids in answers))

    write([5, 6, 7, 8], [9, 10, 11])
    assert kept(hf) == [2] and kept(hf) == []
    assert all(answer.file for answer in data.read_answers(file, layers, hf))
    write([5, 6, 7, 9], [9, 10, 11])
    assert not any(answer.file for answer in data.read_answers(file, layers, hf))
    assert kept(hf) == [2] and kept(hf) == []
    other = copy.deepcopy(hf)
    other.get_output_embeddings().weight.data[0, 0] += 1
    assert kept(other) == [2] and kept(hf) == [2]
    (tmp_path / "x.states.json").write_text("")  # the disk was full
    assert kept(hf) == [2]
    write([5, 6, len(hf.get_input_embeddings().weight)])
    with pytest.raises(ConfigError, match=r"line 1: .* is no id of"):
        kept(hf)


def test_a_walk_goes_on_behind_the_first_wrong_draft() -> None:
    answer = data.Answer((9, 9, 1, 2, 3, 4, 5, 6), 2)
    drafts = torch.tensor([[2, 3, 0], [0, 0, 0], [0, 0, 0], [5, 6, 7], [0, 0, 0], [0, 0, 0]])
    hits = matches(answer, drafts)
    # at 1: 2 and 3 are right, 4 comes with the check; at 4: 5 and 6, and the answer ends
    assert walk(hits) == [2, 2]
    assert hits[3].tolist() == [True, True, False]


def test_a_draft_that_ends_the_answer_has_no_token_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six tokens: one before the first draft, five in two rounds."""
    answer = data.Answer((9, 9, 1, 2, 3, 4, 5, 6), 2)
    drafts = torch.tensor([[2, 3, 0], [0, 0, 0], [0, 0, 0], [5, 6, 7], [0, 0, 0]])
    monkeypatch.setattr("dllm.train.dflash.evaluate.drafts_at", lambda *_: drafts[None])
    trainee: Any = SimpleNamespace(
        head=torch.zeros(1), blocks=SimpleNamespace(drafts=3),
        reader=SimpleNamespace(read=lambda ids: None),
    )  # fmt: skip
    states = data.HiddenStates([0], 2)
    assert acceptance(trainee, [answer], states, 4) == (2.5, [1.0, 1.0, 0.0])


@pytest.fixture(scope="module")
def verifier() -> dllm.DiffusionModel:
    return dllm.load("nano-ar")


@pytest.fixture(scope="module")
def answers(verifier: dllm.DiffusionModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of nano-ar to generated tasks."""
    from dllm.train.recipes.deer import teacher_answers

    file = tmp_path_factory.mktemp("data") / "answers.jsonl"
    with file.open("w") as out:
        for prompt, answer in teacher_answers(
            verifier, task_questions(120, 0), file.with_name("own.jsonl"), 32
        ):
            out.write(json.dumps({"ids": [*prompt, *answer], "answer": len(prompt)}) + "\n")
    return file


def test_answers_fit_the_context(verifier: dllm.DiffusionModel, tmp_path: Path) -> None:
    prompts = [np.arange(20, 20 + n) for n in (120, 4)]
    file = tmp_path / "answers.jsonl"
    assert list(write_answers(verifier, file, 2, prompts=prompts, max_new_tokens=200)) == [2]
    assert all(len(json.loads(line)["ids"]) <= 128 for line in file.read_text().splitlines())
    more = [*prompts, np.arange(3, 9)]
    assert list(write_answers(verifier, file, 3, prompts=more, max_new_tokens=200)) == [3]
    for other, length in ((more[::-1], 200), (more, 4)):
        with pytest.raises(ConfigError, match="answers other prompts, or in another way"):
            next(iter(write_answers(verifier, file, 3, prompts=other, max_new_tokens=length)))


def test_own_prompts_begin_with_every_starter_in_turn(
    verifier: dllm.DiffusionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever piece of the work they are of."""
    begun: list[str] = []

    def prompts(_: Any, count: int, seed: int, starters: list[str]) -> list[list[int]]:
        begun.extend(starters[i // 2 % len(starters)] for i in range(1, count, 2))
        return [[seed + 5 + i] for i in range(count)]

    monkeypatch.setattr("dllm.train.trajectories.PIECE", 4)
    monkeypatch.setattr("dllm.train.dflash.generate.self_prompts", prompts)
    file, starters = tmp_path / "answers.jsonl", ["A", "B", "C", "D", "E"]
    how: dict[str, Any] = {"max_new_tokens": 2, "starters": starters}
    assert [*write_answers(verifier, file, 10, **how)] == [4, 8, 10]
    assert begun == starters
    first = [json.loads(line)["ids"][0] for line in file.read_text().splitlines()]
    assert len({*first}) == 10


def small(steps: int, every: int = 5, **head: int) -> DFlashTraining:
    return DFlashTraining(
        layers=2, block_size=4, held_out=6, evaluated=8,
        objective=Objective(head_rows=256, random_rows=32, **head),
        schedule=Schedule(steps=steps, rows=8, anchors=8, warmup=2, evaluate_every=every),
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_learns_and_its_drafter_can_be_used(
    verifier: dllm.DiffusionModel, answers: Path, tmp_path: Path
) -> None:
    recipe = small(20)
    config = begun(verifier, recipe).blocks.drafter.config
    assert list(keep_states([answers], verifier.hf, config))[-1] == 120
    assert list(keep_states([answers], verifier.hf, config)) == []
    layers = list(config.target_layer_ids)
    (first, *_), width = data.read_answers(answers, layers[1:]), config.hidden_size
    fewer = data.HiddenStates(layers[1:], width).read(first)  # of a file that has more
    whole = data.HiddenStates(layers, width).read(first)
    assert torch.equal(fewer, whole[:, width:]) and fewer.shape[1] == 2 * width
    run, split = start(verifier, [answers], recipe, tmp_path, bf16=False)
    assert all(answer.file is not None for answer in split.train)
    with pytest.raises(ConfigError, match="another recipe, with another layers"):
        start(verifier, [answers], replace(recipe, layers=3), tmp_path, bf16=False)
    resume(run)
    points = curve(run.state.log_history, 64)
    assert points[-1]["tokens_per_forward"] > points[0]["tokens_per_forward"] + 0.04
    finish(run, verifier, recipe, split, tmp_path / "drafter")
    text = (tmp_path / "drafter" / "README.md").read_text()
    assert f"| 20 | 1280 | {points[-1]['tokens_per_forward']:.2f} |" in text
    result = dllm.speculate(verifier, str(tmp_path / "drafter"), "3+4=", controller="full")
    assert result.tokens == dllm.speculate(verifier, None, "3+4=").tokens


@pytest.mark.slow
def test_a_head_is_trained_beside_and_drafts_as_it_was_measured(
    verifier: dllm.DiffusionModel, answers: Path, tmp_path: Path
) -> None:
    recipe = small(2, 2, markov=8)
    recipe = replace(recipe, schedule=replace(recipe.schedule, accumulate=2))
    run, split = start(verifier, [answers], recipe, tmp_path, bf16=False)
    before = run.model.walk.project_out.weight.detach().clone()  # type: ignore[union-attr]
    resume(run)
    trainee: Any = run.model
    assert not torch.equal(trainee.walk.project_out.weight, before)
    finish(run, verifier, recipe, split, tmp_path / "drafter")
    assert "| 2 | 256 |" in (tmp_path / "drafter" / "README.md").read_text()
    part = BlockDrafterAtWork(tmp_path / "drafter")
    hf: Any = verifier.hf
    head = head_of(part.model, hf.device, hf.get_input_embeddings().weight,
                   hf.get_output_embeddings().weight)  # fmt: skip
    assert head is not None
    hidden = torch.randn(hf.config.hidden_size)
    weight = hf.get_output_embeddings().weight.detach().float()
    with torch.no_grad():  # a correction of the hidden state is one of the logits
        known = hf.get_input_embeddings().weight[17]
        expected = weight @ trainee.walk(hidden, known)
        values, at = candidates((weight @ hidden)[None])
        got = (values[0] + torch.from_numpy(head.over(hidden[None], at)(17, 0)))[:16]
    # it was saved in bfloat16
    torch.testing.assert_close(got, expected[at[0, :16]], atol=0.05, rtol=0.02)
    result = dllm.speculate(verifier, part, "3+4=", controller="full")
    assert result.tokens == dllm.speculate(verifier, None, "3+4=").tokens
    saved = str(tmp_path / "drafter")
    on = replace(recipe, weights_from=saved)
    more, _ = start(verifier, [answers], on, tmp_path / "on", bf16=False)
    with pytest.raises(ConfigError, match="another weights_from"):
        start(verifier, [answers], recipe, tmp_path / "on", bf16=False)
    started: Any = more.model
    for now, before in zip(started.parameters(), trainee.parameters(), strict=True):
        assert torch.equal(now, before.bfloat16().float())  # as it was saved, the head too
    few = replace(recipe, draft_vocabulary=3)
    finish(more, verifier, few, split, tmp_path / "few")
    known = load_checkpoint(tmp_path / "few").draft_ids
    assert known is not None and len(known) == 3
    fewer = replace(recipe, draft_vocabulary=1, weights_from=str(tmp_path / "few"))
    finish(more, verifier, fewer, split, tmp_path / "fewer")
    kept = load_checkpoint(tmp_path / "fewer").draft_ids
    assert kept is not None and kept.tolist() == known.tolist()
    with pytest.raises(ConfigError, match="another num_hidden_layers"):
        start(verifier, [answers], replace(on, layers=3), tmp_path / "no", bf16=False)


def test_too_few_answers_are_refused(verifier: dllm.DiffusionModel, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text('{"ids": [5, 6, 7, 8, 9, 10, 11, 12], "answer": 2}\n' * 3)
    with pytest.raises(ConfigError, match="more answers are needed"):
        start(verifier, [few], small(1), tmp_path, bf16=False)
    lines = [{"ids": [5 + i, *range(6, 20)], "answer": 2} for i in range(20)]
    few.write_text("\n".join(map(json.dumps, lines)))
    recipe = replace(small(1), held_out=2, schedule=Schedule(rows=20))
    with pytest.raises(ConfigError, match=r"too few for batches of 20: .* fewer --rows"):
        start(verifier, [few], recipe, tmp_path, bf16=False)
    assert [*tmp_path.iterdir()] == [few]  # with other --held-out or --rows the run goes on


def test_the_curve_is_what_was_logged() -> None:
    history = [{"step": 5, "loss": 1.0},
               {"step": 10, "eval_tokens_per_forward": 1.5, "eval_reached_1": 0.5}]  # fmt: skip
    points = curve(history, 100)
    assert points == [{"step": 10, "blocks": 1000, "tokens_per_forward": 1.5, "reached_1": 0.5}]
    assert table(points)[-1] == "| 10 | 1000 | 1.50 | 0.50 |"


def test_norms_of_queries_and_keys_are_those_of_a_verifier_that_has_them() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from dllm.train.dflash.model import copy_layers

    config = Qwen3Config(**shape(head_dim=8).to_dict() | {"model_type": "qwen3"})
    for verifier, size in ((Qwen3ForCausalLM(config), 7.0), (LlamaForCausalLM(shape()), 2.0)):
        for name, weight in verifier.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                weight.data.fill_(7)
        drafter = new_drafter(
            drafter_config(verifier.config, layers=2, block_size=4, mask_token_id=3)
        )
        copy_layers(drafter, verifier)
        norms = [
            w for name, w in drafter.named_parameters() if "q_norm" in name or "k_norm" in name
        ]
        assert len(norms) == 4 and all((weight == size).all() for weight in norms)


def test_a_verifier_of_another_form_starts_from_random_weights() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from dllm.train.dflash.model import copy_layers

    drafter = new_drafter(drafter_config(shape(), layers=2, block_size=4, mask_token_id=3))
    with pytest.raises(ConfigError, match="random weights"):
        copy_layers(drafter, LlamaForCausalLM(shape(intermediate_size=40)))
    with pytest.raises(ConfigError, match="random weights"):
        copy_layers(drafter, LlamaForCausalLM(shape(num_hidden_layers=1)))
    with pytest.raises(ConfigError):
        copy_layers(drafter, GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4)))


@pytest.mark.parametrize("name", ["Olmo2", "Gemma", "Gemma3"])
def test_a_verifier_with_other_norms_starts_from_random_weights(name: str) -> None:
    """OLMo norms what layers give, not what they read; Gemma adds one to the weights of norms."""
    from dllm.train.dflash.model import copy_layers

    kind = "Gemma3Text" if name == "Gemma3" else name
    settings = shape(head_dim=8).to_dict()
    for one in ("model_type", "architectures", "layer_types"):
        settings.pop(one, None)
    config = getattr(transformers, f"{kind}Config")(**settings)
    verifier = getattr(transformers, f"{name}ForCausalLM")(config)
    drafter = new_drafter(drafter_config(config, layers=2, block_size=4, mask_token_id=3))
    with pytest.raises(ConfigError, match="random weights"):
        copy_layers(drafter, verifier)
