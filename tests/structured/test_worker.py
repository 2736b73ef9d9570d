"""Expressions that would never be done, and what they leave behind."""

import threading
from pathlib import Path
from typing import Any

import pytest

import dllm
from dllm.core.errors import ConfigError
from dllm.structured import building, source
from dllm.structured.compiling import Tables
from dllm.structured.vocabulary import Vocabulary
from dllm.structured.worker import Worker

from ..thin import some
from .toy import PIECES

VOCABULARY = Vocabulary(PIECES, False, "toy")
BYTES = Vocabulary(tuple(bytes([i]) for i in range(256)), False, "bytes")


def compiled(worker: Worker, pattern: str) -> Tables:
    return worker.compile(source.regex(pattern), VOCABULARY)


def test_the_process_can_be_ended_at_any_moment() -> None:
    worker = Worker()
    try:
        assert compiled(worker, "ab*").start >= 0
        first = worker._child._process
        assert first is not None
        threading.Timer(0.05, first.kill).start()
        with pytest.raises(ConfigError, match="was given up: the process that compiles it ended"):
            compiled(worker, "|".join(f"(a|b)*a(a|b){{{n}}}" for n in range(11, 12)) + "|a{9000}")
        assert first.poll() is not None
        assert compiled(worker, "ab*").start >= 0
        second = worker._child._process
        assert second is not None and second is not first and second.poll() is None
    finally:
        worker.close()
    assert second.poll() is not None


MUTUAL = {
    "$ref": "#/$defs/0",
    "$defs": {str(i): {"properties": {str(j): {"$ref": f"#/$defs/{j}"} for j in range(4)}}
              for i in range(4)},
}  # fmt: skip
DOUBLING = {
    "$ref": "#/$defs/24",
    "$defs": {"0": {"type": "null"}} | {
        str(i): {"type": "array", "prefixItems": [{"$ref": f"#/$defs/{i - 1}"}] * 2,
                 "minItems": 2, "items": False} for i in range(1, 25)},
}  # fmt: skip
EXPLODING = [
    source.regex("(a|b)*a(a|b){30}"), source.regex("((a{100}){100}){100}"),
    source.json_schema({"properties": {f"p{i}": {} for i in range(1000)}}),
    source.regex("(a{0,99}){0,99}" * 9),
    source.json_schema(MUTUAL), source.json_schema(DOUBLING),
    source.json_schema({"oneOf": [{"type": "object", "required": ["a"], "properties": {
        "a": {"const": i}}} for i in range(4000)]}),
    source.json_schema({"type": "array", "items": {"type": "string"}, "minItems": 10**9}),
    source.json_schema({"type": "string", "minLength": 10**9}),
    source.json_schema({"type": "object", "minProperties": 10**9}),
]  # fmt: skip


def test_schemas_may_be_nested_200_deep() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(200):
        schema = {"type": "object", "required": ["a"], "properties": {"a": schema}}
    worker = Worker()
    try:
        assert worker.compile(source.json_schema(schema), BYTES).start >= 0
    finally:
        worker.close()


@pytest.mark.parametrize("number", some(range(len(EXPLODING)), 3))
def test_what_explodes_ends_within_its_steps(number: int) -> None:
    """Whatever it comes to, an answer or one sentence, the process stays; nothing is timed."""
    worker = Worker()
    try:
        compiled(worker, "a")
        first = worker._child._process
        try:
            worker.compile(EXPLODING[number], BYTES)
        except ConfigError as error:
            assert "allow less" in str(error) or "allows no value" in str(error)
            assert "\n" not in str(error)
        assert worker._child._process is first and first is not None and first.poll() is None
    finally:
        worker.close()


def test_limits_and_errors_leave_the_process_alone() -> None:
    worker = Worker()
    try:
        compiled(worker, "a")
        first = worker._child._process
        compiled(worker, "a{25000}")  # about as many states as SchemaStore's lefthook has
        with pytest.raises(ConfigError, match="more than 30,000 states"):
            compiled(worker, "(a|b)*a(a|b){14}")
        with pytest.raises(ConfigError, match="is not well formed"):
            compiled(worker, "a(")
        with pytest.raises(ConfigError, match=r"the structure is not well formed: .* surrogates"):
            tag = {"begin": "<\ud800", "end": "</a>"}
            both = {"triggers": ["<"], "structures": [tag]}
            worker.compile(source.structural_tag(both), VOCABULARY)
        compiled(worker, "b")
        assert worker._child._process is first, "one process for all of them"
    finally:
        worker.close()


def test_what_was_refused_is_not_compiled_again(
    tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, compile = list[str](), building.WORKER.compile

    def counted(wanted: source.Source, vocabulary: Vocabulary) -> Tables:
        asked.append(wanted["regex"])
        return compile(wanted, vocabulary)

    monkeypatch.setattr(building.WORKER, "compile", counted)
    for _ in range(2):
        with pytest.raises(ConfigError, match="look-around"):
            dllm.generate(tiny, [5, 9], regex="refused(?=twice)")
    assert asked == ["refused(?=twice)"]


def test_a_keyword_is_told_on_one_line_without_signs_of_a_terminal() -> None:
    worker = Worker()
    schema = {"type": "null", "\x1b[2J\nERROR\u2028": 1} | {f"keyword{i}": 1 for i in range(99)}
    try:
        with pytest.warns(UserWarning, match="which are ignored: ") as caught:
            worker.compile(source.json_schema(schema), BYTES)
        assert str(caught[0].message).isprintable() and len(str(caught[0].message)) < 400
    finally:
        worker.close()


def test_several_threads() -> None:
    worker = Worker()
    result: dict[int, int] = {}

    def ask(n: int) -> None:
        result[n] = len(compiled(worker, f"a{{{n}}}").accepting)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(1, 9)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        worker.close()
    assert result.keys() == set(range(1, 9)) and result[8] > result[1]


def test_a_process_that_computes_too_long_is_ended() -> None:
    worker = Worker(seconds=0.2)
    try:
        with pytest.raises(ConfigError, match=r"more than 4 GB or 0\.2 s of processor time"):
            worker.compile(EXPLODING[2], BYTES)
        assert worker._child._process is None
    finally:
        worker.close()


def test_a_script_may_lie_beside_files_named_as_modules_of_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What this program has imported already, such as ``enum``, is not looked for there."""
    (tmp_path / "enum.py").write_text("raise RuntimeError('not of the standard library')")
    monkeypatch.syspath_prepend(tmp_path)
    worker = Worker()
    try:
        compiled(worker, "a")
    finally:
        worker.close()
