"""The ParallelBench-style tasks: right answers pass, wrong ones do not, forms are kept apart."""

from __future__ import annotations

import pytest

import dllm
from dllm.eval.problems import problems, prompt_of, task_names
from dllm.eval.tasks import TASKS
from dllm.eval.tasks.parallel import PARALLEL, ChatExample, is_sentence, loose_items, strict_items

from ..thin import some

QUEUES = [
    name for name in PARALLEL if not name.endswith(("latin", "sudoku")) and "words" not in name
]


@pytest.mark.parametrize("name", some(PARALLEL, 12))
def test_references_pass_both_readings_and_are_seeded(name: str) -> None:
    task = PARALLEL[name]
    examples = task.examples(40)
    assert examples == task.examples(40) != task.examples(40, seed=1)
    assert all(task.check(e, e.answer) and task.strict(e, e.answer) for e in examples)
    assert not any(task.check(e, "") or task.strict(e, "") for e in examples)


@pytest.mark.parametrize("name", QUEUES)
def test_loose_reads_what_strict_refuses(name: str) -> None:
    task = PARALLEL[name]
    for example in task.examples(10):
        chatty = f"Sure! Here it is: {example.answer} Anything else?"
        single = example.answer.replace('"', "'")
        assert task.check(example, chatty) and task.check(example, single)
        assert not task.strict(example, chatty) and not task.strict(example, single)
        items = loose_items(example.answer)
        assert not task.check(example, str([*items, "Some Body", "Else Too"]))


def test_the_original_list_is_wrong_where_something_changes() -> None:
    for name in QUEUES:
        for example in PARALLEL[name].examples(20):
            items = [str(fact) for fact in example.facts[:-2]]
            same = PARALLEL[name].check(example, str(items))
            unchanged = name.startswith("pb_copy") or loose_items(example.answer) == items
            assert same == unchanged, (name, example)


@pytest.mark.parametrize("name", some(QUEUES, 10))
def test_queues_are_as_long_as_they_should_be(name: str) -> None:
    """3 to 6 people, or 15; none of them twice."""
    examples = PARALLEL[name].examples(60)
    sizes = {len(example.facts) - 2 for example in examples}
    assert sizes == ({15} if name.endswith("_15") else {3, 4, 5, 6})
    assert all(len(set(example.facts[:-2])) == len(example.facts) - 2 for example in examples)


@pytest.mark.parametrize("name", ["pb_sort", "pb_sort_15"])
def test_sorting_is_by_last_name(name: str) -> None:
    for example in PARALLEL[name].examples(20):
        lasts = [name.split()[1] for name in loose_items(example.answer)]
        assert lasts == sorted(lasts)


def test_any_place_is_right_where_the_choice_is_free() -> None:
    for name in ("pb_insert_random", "pb_remove_random", "pb_replace_random", "pb_shuffle"):
        task = PARALLEL[name]
        for example in task.examples(10):
            *items, _, word = (str(fact) for fact in example.facts)
            others = {
                "pb_insert_random": [word, *items], "pb_remove_random": items[1:],
                "pb_replace_random": [word, *items[1:]], "pb_shuffle": items[1:] + items[:1],
            }  # fmt: skip
            assert task.check(example, str(others[name]))


def test_grids() -> None:
    latin, sudoku = PARALLEL["pb_latin"].examples(1)[0], PARALLEL["pb_sudoku"].examples(1)[0]
    rows = latin.answer.split("\n")
    assert PARALLEL["pb_latin"].check(latin, "\n".join(rows[1:] + rows[:1]))
    assert not PARALLEL["pb_latin"].check(latin, "\n".join([rows[0]] * 4))
    spaced = "\n".join(" ".join(row) for row in sudoku.answer.split("\n"))
    assert PARALLEL["pb_sudoku"].check(sudoku, spaced)
    assert not PARALLEL["pb_sudoku"].strict(sudoku, spaced)
    assert not PARALLEL["pb_sudoku"].check(sudoku, "1234\n" * 4)


def test_sentences() -> None:
    example = ChatExample("pb_words_easy", "", "", ("ball", "dog", "park", "throw"))
    good = "At the park, she throws a ball for her dog."
    task = PARALLEL["pb_words_easy"]
    assert task.check(example, good) and is_sentence(example, good)
    for bad in ("At the park she throws a ball.", "dog park ball throw"):
        assert not is_sentence(example, bad)
    assert task.check(example, "dog park ball throw")  # the words alone, without a sentence
    assert not is_sentence(example, "Dog ball throw park the the the the.")
    assert not is_sentence(example, good + " " + good)


def test_examples_come_as_an_earlier_turn() -> None:
    example = PARALLEL["pb_copy"].examples(1)[0]
    messages = prompt_of(example)
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages[0]["content"] != messages[2]["content"] == example.prompt
    assert strict_items(messages[1]["content"]) is not None
    assert prompt_of(TASKS["copy"].examples(1)[0]) == TASKS["copy"].examples(1)[0].prompt


def test_they_do_not_touch_the_vocabulary_of_nano() -> None:
    assert not set(PARALLEL) & set(TASKS)
    assert set(PARALLEL) < set(task_names()) and problems("pb_copy") is PARALLEL["pb_copy"]


def test_nano_refuses_what_does_not_fit_its_context() -> None:
    from dllm.eval.measure import Cell, Setting, measure

    cell = Cell("pb_copy", Setting("t", "threshold", "none", {"max_new_tokens": 2040}), 2)
    with pytest.raises(dllm.ConfigError, match="choose another task"):
        measure(dllm.load("nano"), PARALLEL["pb_copy"], cell, "nano")
