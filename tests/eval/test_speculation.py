"""Spec-Bench files in and out, SPEED-Bench's figures."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dllm
from dllm.eval.speculation import Turn, answer, by_category, read_questions, rows, write_answers
from dllm.train.tokenizer import build_tokenizer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 101, "category": "math", "turns": ["1 + 1?"], "reference": ["2"]},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_questions_in_answers_out(file: Path, tmp_path: Path) -> None:
    writing, math = read_questions(file)
    assert writing.turns == ("Write.", "Again.") and math.reference == ("2",)
    turns = [Turn("a", 7, 0.5, (4, 4), (4, 1)), Turn("b", 3, 0.25, (4,), (2,))]
    out = tmp_path / "answers.jsonl"
    write_answers(out, "mine", [(writing, turns)])
    entry = json.loads(out.read_text())
    assert (entry["question_id"], entry["model_id"]) == (81, "mine")
    assert entry["choices"] == [
        {"index": 0, "turns": ["a", "b"], "decoding_steps": [2, 1], "new_tokens": [7, 3],
         "wall_time": [0.5, 0.25], "accept_lengths": [5, 2, 3]}
    ]  # fmt: skip


def test_prepared_conversations_are_read(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    line = {"question_id": "x1", "category": "low_entropy", "messages": said}
    path = tmp_path / "throughput_1k.jsonl"
    path.write_text(json.dumps(line) + "\n")
    (question,) = read_questions(path)
    assert (question.question_id, question.category, question.turns) == (
        "x1",
        "low_entropy",
        ("a",),
    )


def test_turns_are_asked_with_what_was_said_before(file: Path) -> None:
    question, heard = read_questions(file)[0], []

    def speak(messages: list[dict[str, str]]) -> SimpleNamespace:
        heard.append([message["content"] for message in messages])
        rounds = [SimpleNamespace(depth=4, accepted=len(messages))]
        return SimpleNamespace(text=f"a{len(messages)}", tokens=[1] * 3, seconds=0.1, rounds=rounds)

    turns = answer(question, speak)
    assert heard == [["Write."], ["Write.", "a1", "Again."]]
    assert [turn.accepted for turn in turns] == [(1,), (3,)] and turns[0].drafted == (4,)


def test_speculative_results_become_turns(file: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(build_tokenizer()), hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, initializer_range=0.5,
    )  # fmt: skip
    verifier = dllm.load(LlamaForCausalLM(config), family="autoregressive",
                         tokenizer=build_tokenizer())  # fmt: skip
    question = read_questions(file)[1]
    how = {"max_new_tokens": 16, "controller": "fixed(k=4)"}
    turns = answer(question, lambda m: dllm.speculate(verifier, "prompt_lookup", m, **how))
    result = dllm.speculate(verifier, "prompt_lookup", question.turns[0], **how)
    assert turns[0].tokens == len(result.tokens) and sum(turns[0].accepted) == result.accepted
    outcome = by_category([(question, turns)])["overall"].acceptance
    assert outcome.rounds == result.nfe and outcome.length == len(result.tokens) / result.nfe
    assert sum(turns[0].lengths) == len(result.tokens)


def test_figures_per_category(file: Path) -> None:
    writing, math = read_questions(file)
    answers = [
        (writing, [Turn("a", 7, 0.5, (4, 4), (4, 1))]),
        (math, [Turn("b", 3, 1.0, (4, 2), (0, 2))]),
    ]
    result = by_category(answers)
    assert list(result) == ["writing", "math", "overall"]
    assert result["writing"].acceptance.length == 3.5 and result["math"].tokens_per_second == 3
    assert result["overall"].acceptance.length == 10 / 4  # the last round's third ended the text
    assert answers[1][1][0].lengths == [1, 2]
    assert result["overall"].acceptance.conditional == (3 / 4, 2 / 3, 1.0, 1.0)
    assert json.loads(json.dumps(rows(result)))[2]["category"] == "overall"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question_id": 1, "turns": ["x"]}', "line 1 .* lacks category"),
        ('{"question_id": 1, "category": "a", "turns": []}', "turns is a list"),
        ('{"question_id": 1, "category": "a", "messages": [{"role": "user"}]}', "turns is a list"),
        (
            '{"question_id": 1, "category": "a", "turns": ["FETCHED USING SPECDEC_BENCH"]}',
            "SPEED-Bench's own preparation first",
        ),
        ("{", "line 1 .* is not JSON"),
        ("", "holds no questions"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(content)
    with pytest.raises(dllm.ConfigError, match=message):
        read_questions(path)
