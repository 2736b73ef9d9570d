"""The bundled model: small, and able to do what its card says."""

import json
from functools import cache
from importlib import resources

import pytest
import torch

import dllm
from dllm.eval.tasks import TASKS
from examples.nano.recipe import accuracy
from examples.nano.tokenizer import build_tokenizer

from ..thin import some

MOST_BYTES = 12_000_000
APPLES = "Tom has 23 apples. Tom buys 12 more. How many apples does Tom have?"


@cache
def nano() -> dllm.DiffusionModel:
    return dllm.load("nano")


def test_the_readme_prompt_is_answered() -> None:
    out = dllm.generate("nano", APPLES)
    assert "The answer is 35." in out.text and out.finish_reason == "stop"


LEARNED = ["copy", "reverse", "insert", "remove", "replace", "sort", "sum", "story2"]


@pytest.mark.parametrize("task", some(LEARNED, 2))
def test_held_out_prompts_are_answered(task: str) -> None:
    assert accuracy(nano(), 24, [task], sampler="threshold")[task] >= 0.8


@pytest.mark.parametrize("task", some(LEARNED, 1))
def test_the_sibling_answers_them_too(task: str) -> None:
    assert accuracy(dllm.load("nano-ar"), 8, [task])[task] >= 0.7


@pytest.mark.slow
def test_too_much_parallelism_costs_accuracy() -> None:
    task = "insert_random"  # several answers are right, and their tokens have to agree
    slow = accuracy(nano(), 24, [task], sampler="threshold(0.99)", max_new_tokens=32)[task]
    fast = accuracy(nano(), 24, [task], sampler="threshold(0)", max_new_tokens=32)[task]
    assert slow - fast >= 0.2


@pytest.mark.slow
def test_a_threshold_saves_forwards_at_little_cost() -> None:
    prompts = [e.prompt for e in TASKS["reverse"].examples(4)]
    slow = dllm.generate(nano(), prompts, sampler="llada")
    fast = dllm.generate(nano(), prompts, sampler="threshold(0.9)")
    assert sum(r.nfe for r in fast) < 0.7 * sum(r.nfe for r in slow)


def test_the_tokenizer_is_the_one_the_tasks_define() -> None:
    assert nano().tokenizer is not None
    assert build_tokenizer().get_vocab() == nano().tokenizer.get_vocab()


def test_it_fits_its_budget_and_is_float16() -> None:
    folders = [resources.files("dllm") / "nano" / name for name in ("nano", "nano-ar")]
    files = [file for folder in folders for file in folder.iterdir() if file.is_file()]
    assert sum(len(file.read_bytes()) for file in files) <= MOST_BYTES
    config = json.loads((folders[0] / "config.json").read_text())
    assert config["torch_dtype"] == "float16"
    assert nano().dtype == torch.float32  # on CPU, bundled models compute in float32


def test_the_examples_of_a_split_are_disjoint_and_seeded() -> None:
    for task in TASKS.values():
        test, train = task.examples(60), task.examples(60, split="train")
        assert not {e.facts for e in test} & {e.facts for e in train}
        assert test == task.examples(60)
        assert all(task.check(e, e.answer) for e in (*test, *train))


@pytest.mark.parametrize(
    ("task", "wrong"),
    [("copy", "Tom"), ("sum", "The answer is 1000."), ("shuffle", ""), ("latin", "A B C D"),
     ("sudoku", "1 1 1 1 / 1 1 1 1 / 1 1 1 1 / 1 1 1 1"), ("insert_random", "Tom, Anna")],
)  # fmt: skip
def test_wrong_answers_are_wrong(task: str, wrong: str) -> None:
    example = TASKS[task].examples(1)[0]
    assert not TASKS[task].check(example, wrong)


def test_a_shuffle_must_differ_and_keep_its_items() -> None:
    example = TASKS["shuffle"].examples(1)[0]
    items = [str(fact) for fact in example.facts]
    assert not TASKS["shuffle"].check(example, ", ".join(items))
    assert TASKS["shuffle"].check(example, ", ".join(items[::-1]))
    assert not TASKS["shuffle"].check(example, ", ".join([*items[:-1], items[0]]))
