"""Answers with a form from the bundled model and from random weights."""

import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel, Field
from typer.testing import CliRunner

import dllm
from dllm.cli.app import app
from dllm.request.holes import measured

from ..thin import covering, some

QUESTION = "What is 23 + 12?"


@pytest.mark.parametrize(("regex", "temperature"), covering(
    [r"[0-9]{2}", r"\d+ \+ \d+ = \d+", "[a-z ]{5,20}[.]", "é你+", ""], [0.0, 1.0]
))  # fmt: skip
def test_an_answer_matches(nano: dllm.DiffusionModel, regex: str, temperature: float) -> None:
    out = dllm.generate(nano, QUESTION, regex=regex, temperature=temperature)
    assert re.fullmatch(regex, out.text), out.text
    assert out.finish_reason == "stop"


def test_a_choice(nano: dllm.DiffusionModel) -> None:
    choices = ["Anna, Ben", "Ben, Anna, Tom", "Tom. (really)"]
    assert (
        dllm.generate(nano, "Reverse this list: Tom, Anna, Ben", choice=choices).text == choices[1]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"regex": "("}, "not well formed"),
        ({"regex": r"(a)\1"}, "back references"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": "a", "choice": ["b"]}, "keep regex or choice"),
        ({"regex": "a", "min_new_tokens": 5}, "min_new_tokens does not go"),
        ({"regex": "a", "eos_policy": "suppress"}, "suppress"),
        ({"regex": "a", "confidence": "none"}, "confidence"),
        ({"confidence": "model"}, "about structured output"),
        ({"choice": "yes"}, "list of texts"),
        ({"choice": []}, "list of texts"),
        ({"regex": 5}, "expression"),
        ({"regex": "[a-z]{80}", "max_new_tokens": 20}, "has at least"),
        ({"regex": "abc", "constraints": {0: "x"}}, "no text of this regex fits"),
        ({"regex": "a", "sampler": "credit"}, "proposes tokens of its own"),
        ({"regex": "[^\x00-\U0010ffff]"}, "allows no text"),
    ],
)
def test_one_sentence_before_any_forward(
    nano: dllm.DiffusionModel, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(dllm.DllmError, match=message) as caught:
        dllm.generate(nano, QUESTION, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("filters", "sampler"),  # the law before and after filters
    some(product([{"top_k": 1}, {"top_p": 1e-4}, {"min_p": 1.0}], ["fixed(1)", "d2f"]), 2),
)
def test_filters_take_dropped_tokens_only_where_nothing_else_is_left(
    nano: dllm.DiffusionModel, filters: dict[str, float], sampler: str
) -> None:
    how = {"temperature": 3.0, "max_new_tokens": 8, "sampler": sampler, "block_length": 8}
    greedy = dllm.generate(nano, QUESTION, **how | {"temperature": 0.0}).text
    texts = [
        [dllm.generate(nano, QUESTION, regex=regex, seed=seed, **how, **more).text
         for seed in range(2)]
        for regex, more in ((".*", {}), (".*", filters), ("[^0-9]{5}", filters))
    ]  # fmt: skip
    assert len({*texts[0]}) > 1 and {*texts[1]} == {greedy}
    assert all(re.fullmatch("[^0-9]{5}", text) for text in texts[2])


def test_holes_of_unknown_length_beside_holes_with_a_form(nano: dllm.DiffusionModel) -> None:
    text = "23 + 12: 3 + 2 =[[1..3]], 2 + 1 =[[1: [3-9]]]:[[*]]."
    out = dllm.infill(nano, text, prompt=QUESTION)
    assert re.fullmatch(r"23 \+ 12: 3 \+ 2 =.+, 2 \+ 1 = [3-9]:.+\.", out.text)
    sizes = dllm.infill(nano, text.replace(": [3-9]", ""), prompt=QUESTION)
    assert out.probes == sizes.probes > 0 and out.canvas == sizes.canvas
    with pytest.raises(dllm.DllmError, match="and others have a regex"):
        measured(nano, text, np.zeros(0, np.int64), "dreamon")


def test_text_that_is_given(nano: dllm.DiffusionModel) -> None:
    out = dllm.generate(nano, QUESTION, regex="[0-9]+ is .* sum", constraints={1: " is"})
    assert re.fullmatch("[0-9]+ is .* sum", out.text)


def test_a_text_with_holes_as_a_whole(nano: dllm.DiffusionModel) -> None:
    text = "23 + 12: 3 + 2 =[[1]], 2 + 1 =[[1]]:[[2]]."
    out = dllm.infill(nano, text, prompt=QUESTION, regex=r"[0-9+=:,. ]+7\.")
    assert re.fullmatch(r"23 \+ 12: 3 \+ 2 =.+, 2 \+ 1 =.+:.*7\.", out.text)
    with pytest.raises(dllm.ConfigError, match="no text of this regex fits"):
        dllm.infill(nano, text, prompt=QUESTION, regex="[0-9+=:,. ]+7")
    with pytest.raises(dllm.ConfigError, match="no text of this regex fits the 4 open positions"):
        dllm.infill(nano, "[[4]]", regex="[0-9]{6}")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_verifier_writes_what_it_writes_plainly(
    nano: dllm.DiffusionModel, temperature: float
) -> None:
    regex = r"[0-9]+( \+ [0-9]+)* = [0-9]{2}[.]"
    for seed in range(1):
        how = {"regex": regex, "temperature": temperature, "seed": seed, "max_new_tokens": 24}
        plain = dllm.speculate("nano-ar", None, QUESTION, **how)
        drafted = dllm.speculate("nano-ar", nano, QUESTION, **how)
        assert re.fullmatch(regex, plain.text)
        assert drafted.tokens == plain.tokens and drafted.nfe <= plain.nfe


@pytest.mark.parametrize("temperature", some([1.0, 0.0], 1))
def test_a_canvas_that_grows(nano: dllm.DiffusionModel, temperature: float) -> None:
    """The text may need more room than its first block has, and takes no more than it needs."""
    for regex, size in ((r"[a-z ]{30,60}\.", 31), (r"[0-9]{2}", 2), (r"[a-z]+( [a-z]+){9}", 19)):
        out = dllm.generate(nano, QUESTION, regex=regex, length="append(block=8)",
                            max_new_tokens=80, temperature=temperature)  # fmt: skip
        assert re.fullmatch(regex, out.text), out.text
        assert len(out.text) >= size and out.canvas <= 80
    assert dllm.generate(nano, QUESTION, regex="[0-9]{2}", length="append(block=8)").canvas <= 16
    with pytest.raises(dllm.ConfigError, match="has at least"):
        dllm.generate(nano, QUESTION, regex="[a-z]{90}", length="append", max_new_tokens=20)


class Person(BaseModel):
    name: str = Field(max_length=10)
    age: int = Field(ge=0, le=120)


def test_json_comes_back_as_an_object(nano: dllm.DiffusionModel, tmp_path: Path) -> None:
    out = dllm.generate(nano, QUESTION, json_schema=Person, max_new_tokens=48)
    assert isinstance(out.parsed, Person) and out.parsed.model_dump() == json.loads(out.text)
    again = json.loads(json.dumps(out.to_dict()))
    assert json.loads(again["text"]) == out.parsed.model_dump()
    file = tmp_path / "person.json"
    file.write_text(json.dumps(Person.model_json_schema()), encoding="utf-8")
    plain = dllm.generate(nano, QUESTION, json_schema=file, max_new_tokens=48)
    assert plain.text == out.text and plain.parsed == json.loads(out.text)
    assert dllm.generate(nano, QUESTION, regex="[0-9]+").parsed is None
    drafted = dllm.speculate("nano-ar", nano, QUESTION, json_schema=Person, max_new_tokens=48)
    assert isinstance(drafted.parsed, Person)


def test_holes_with_forms(nano: dllm.DiffusionModel) -> None:
    out = dllm.infill(nano, "def f(x):\n    return [[8:[a-z+* ()0-9]+]]\n")
    assert re.fullmatch(r"def f\(x\):\n    return [a-z+* ()0-9]+\n", out.text)
    text = "[[2:[A-Z].*]] and[[3]] are[[2: ([ab]+|c)]]."
    for temperature in (0.0, 1.0):
        out = dllm.infill(nano, text, prompt=QUESTION, temperature=temperature)
        assert re.fullmatch(r"[A-Z].* and.* are ([ab]+|c)\.", out.text, re.DOTALL), out.text
    with dllm.Session(nano) as session:
        assert session.infill(text, prompt=QUESTION).result().text == dllm.infill(
            nano, text, prompt=QUESTION
        ).text  # fmt: skip
    for wrong, message in {
        "a[[2:b]][[3]] c": "need text between them",
        "a[[2:b]] c": "no text of this form fits",
        "a[[2:(]] c": "not well formed",
    }.items():
        with pytest.raises(dllm.ConfigError, match=message):
            dllm.infill(nano, wrong)
    with pytest.raises(dllm.ConfigError, match="drop regex"):
        dllm.infill(nano, text, regex="a")


def test_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"enum": [35, 36]}', encoding="utf-8")
    runner = CliRunner()
    for options, expected in (
        (["--regex", "[0-9]{2}"], "[0-9]{2}"),
        (["--choice", "yes", "--choice", "no"], "yes|no"),
        (["--json-schema", str(file)], "35|36"),
    ):
        result = runner.invoke(app, ["generate", QUESTION, *options])
        assert re.fullmatch(expected, result.stdout.strip()), result.output
