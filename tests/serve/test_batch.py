"""Files of requests: formats, errors per line, and runs that are interrupted."""

import errno
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dllm
from dllm.core.errors import ConfigError, PromptError
from dllm.serve.batch import Line, Lines, Results, digest_of, open_requests
from dllm.serve.service import Service
from tests.cli.conftest import Run

from .conftest import until

PROMPTS = ["one two", "Reverse this list: Tom, Anna", "three"]


def openai_line(name: str, **body: Any) -> str:
    message = {"role": "user", "content": "Compute 2 + 3."}
    content = {"messages": [message], **body}
    return json.dumps(
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": content}
    )


def lines_of(file: Path, **defaults: Any) -> list[Line]:
    return list(Lines(file, defaults))


def results_of(file: Path) -> dict[str, Any]:
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({entry["custom_id"] for entry in entries}) == len(entries)
    return {entry["custom_id"]: entry for entry in entries}


def test_a_file_that_is_not_there_leaves_nothing(cli: Run, tmp_path: Path) -> None:
    done = cli("batch", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    assert done.exit_code == 2 and "is no file" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_file_without_requests(cli: Run, tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    for content in ("", "\n \n"):
        file.write_text(content)
        done = cli("batch", str(file), "--model", str(tiny_folder))
        assert done.exit_code == 2 and "requests.jsonl holds no requests" in done.stderr


def test_lengths_have_another_name_or_none(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"url": "/v1/responses", "body": {"input": "hi"}}))
    assert lines_of(file, max_tokens=9)[0].body == {"input": "hi", "max_output_tokens": 9}
    file.write_text(json.dumps({"messages": [], "max_completion_tokens": 5}))
    assert lines_of(file, max_tokens=9)[0].body == {"messages": [], "max_completion_tokens": 5}
    file.write_text(json.dumps({"url": "/v1/infill", "body": {"text": "a [[4]]"}}))  # it says its
    given = {"max_tokens": 9, "min_tokens": 2, "seed": 3}
    assert lines_of(file, **given)[0].body == {"text": "a [[4]]", "seed": 3}


def test_a_custom_id_of_null_is_none(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(2 * '{"custom_id": null, "prompt": "hi"}\n')
    assert [line.id for line in lines_of(file)] == ["line-1", "line-2"]


def test_null_is_not_given(tmp_path: Path) -> None:
    file, body = tmp_path / "requests.jsonl", '{"messages": [], "max_tokens": null}'
    file.write_text(f'{{"url": null, "body": {body}}}\n{{"prompt": "hi", "messages": null}}\n')
    first, second = lines_of(file, max_tokens=9)
    assert first.url == second.url and first.body == {"messages": [], "max_tokens": 9}
    assert second.body is not None and second.body["messages"][0]["content"] == "hi"


def test_lines_that_are_no_requests(tmp_path: Path) -> None:
    """Such as those of programs on Windows, whose first line has a mark before it."""
    file, most = tmp_path / "requests.jsonl", sys.getrecursionlimit()
    lines = [b"\xef\xbb\xbf" + b'"hi"', b'{"prompt": NaN}', b'{"prompt": 1e999}', b"\xff"]
    nested = [f'{{"prompt": {"[" * n}{"]" * n}}}' for n in (*range(most // 2, most), 100_000)]
    file.write_bytes(b"\n".join([*lines, *map(str.encode, nested)]))
    found = lines_of(file)
    assert found[0].body is not None and len(found) == len(lines) + len(nested)
    assert all("is not JSON" in line.problem for line in [*found[1:4], found[-1]])


def test_formats(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(
        "\n".join(
            [openai_line("a", max_tokens=5), '{"prompt": "hi", "seed": 3}', '"just text"', "",
             '{"custom_id": "m", "messages": [{"role": "user", "content": "x"}]}', "{", "[1]"]
        )
    )  # fmt: skip
    lines = lines_of(file, max_tokens=9)
    assert [line.id for line in lines] == ["a", "line-2", "line-3", "m", "line-6", "line-7"]
    assert lines[0].body is not None and lines[0].body["max_tokens"] == 5
    assert lines[1].body == {
        "max_tokens": 9, "seed": 3, "messages": [{"role": "user", "content": "hi"}]
    }  # fmt: skip
    assert lines[2].url == "/v1/chat/completions"
    assert "not JSON" in lines[4].problem and "no request" in lines[5].problem
    plain = list(Lines(file, {}, chat=False))
    assert plain[2].body == {"prompt": "just text"} and plain[2].url == "/v1/completions"
    text = tmp_path / "prompts.txt"
    text.write_text('{"not": "parsed"}\n\nsecond\n')
    assert [line.id for line in lines_of(text)] == ["line-1", "line-3"]
    with pytest.raises(PromptError, match="cannot read"):
        lines_of(tmp_path / "absent.jsonl")


def test_a_torn_result_is_removed_and_the_rest_stays(tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("\n".join(PROMPTS))
    lines = Lines(file, {}, True)
    with Results(out) as results:
        count, left = open_requests(lines, results)
        assert count == 3
        results.add(next(left), {"id": "x", "response": None, "error": None})
    whole = out.read_bytes()
    for torn in (b'{"custom_id": "line-2", "requ', b'{"cu'):
        out.write_bytes(whole + torn)
        with Results(out) as results:
            count, left = open_requests(lines, results)
            assert (count, [line.id for line in left]) == (2, ["line-2", "line-3"])
        assert out.read_bytes() == whole
    out.write_text("of somebody, and without an end of line")
    with pytest.raises(ConfigError, match="something else"):
        Results(out)
    assert out.read_text().startswith("of somebody")


def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "results.jsonl"
    with pytest.raises(OSError) as caught, Results(file) as results:
        monkeypatch.setattr(os, "fsync", full)
    assert caught.value.filename == str(file)
    results._stream.close()


def test_results_of_other_requests_are_not_mixed(tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("one\n")
    with Results(out) as results:
        _, left = open_requests(Lines(file, {}, True), results)
        results.add(next(left), {"response": None})
        with pytest.raises(ConfigError, match="another run writes"):
            Results(out)
    for changed in (Lines(file, {"seed": 4}, True), Lines(file, {}, False)):
        with Results(out) as results, pytest.raises(ConfigError, match="another request"):
            open_requests(changed, results)
    file.write_text(openai_line("a") + "\n")
    both = tmp_path / "both.jsonl"
    both.write_text(file.read_text() * 2)
    with Results(tmp_path / "new.jsonl") as results, pytest.raises(PromptError, match="'a'"):
        open_requests(Lines(both, {}, True), results)
    with pytest.raises(ConfigError, match="something else"):
        Results(both)
    assert digest_of("u", {"a": 1, "b": 2}) == digest_of("u", {"b": 2, "a": 1})


def test_the_command(
    cli: Run, tiny_folder: Path, tiny: dllm.DiffusionModel, tmp_path: Path
) -> None:
    file, out = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    wrong = [openai_line("bad", temperature=-1), "{", openai_line("s", stream=True),
             json.dumps({"custom_id": "u", "url": "/v1/none", "body": {}}),
             json.dumps({"custom_id": "half \ud800", "prompt": "x"}),
             json.dumps({"custom_id": "v", "url": "\ud800", "body": {}}),
             json.dumps({"custom_id": "r", "url": "/v1/responses",
                         "body": {"input": "x", "max_output_tokens": 4, "min_tokens": 5}}),
             json.dumps({"custom_id": "w", "prompt": "hi \ud800"})]  # fmt: skip
    right = [json.dumps({"custom_id": p, "prompt": p}) for p in PROMPTS]
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    wrong += [json.dumps({"custom_id": "formed", "prompt": "one", **form})]  # which is right
    file.write_text("\n".join([*right, *wrong]))
    how = ("--model", str(tiny_folder), "--max-new-tokens", "16", "--block-length", "8")
    done = cli("batch", str(file), "-o", str(out), *how, "--max-batch-size", "2")
    assert done.exit_code == 1, done.stderr  # some lines failed
    assert "12 answered, 8 of them with an error" in done.stderr
    assert "line-5: line 5 is not JSON" in done.stderr and "bad: temperature must" in done.stderr
    assert done.stderr.count("further errors stand in the results") == 1
    entries = results_of(out)
    plain = dllm.generate(tiny, PROMPTS, max_new_tokens=16, block_length=8)
    for prompt, result in zip(PROMPTS, plain, strict=True):
        body = entries[prompt]["response"]["body"]
        assert entries[prompt]["response"]["status_code"] == 200
        assert body["choices"][0]["message"]["content"] == result.text
    formed = entries["formed"]["response"]["body"]["choices"][0]["message"]
    assert formed["content"] in ("yes", "no")
    assert entries["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert entries["line-5"]["error"]["code"] == "invalid_line"
    assert entries["s"]["response"]["status_code"] == 400
    told = entries["r"]["response"]["body"]["error"]["message"]
    assert told == "min_tokens=5 exceeds max_output_tokens=4"
    assert entries["u"]["response"]["status_code"] == 404
    assert entries["w"]["response"]["status_code"] == 400
    for name in ("half \\ud800", "v"):
        assert "half a surrogate" in entries[name]["error"]["message"]
    again = cli("batch", str(file), "-o", str(out), *how)
    assert "12 results are there already (8 errors), 0 requests are open" in again.stderr
    assert again.exit_code == 1
    assert results_of(out) == entries
    assert cli("batch", str(file), "-o", str(file)).exit_code == 2


@pytest.mark.slow
def test_no_line_is_lost_to_a_queue(cli: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """More forms than are prepared at a time, more answers to a line than decode at a time, and
    more than wait: all of them are admitted when there is room."""
    file, out = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    forms = [{"prompt": "x", "structured_outputs": {"regex": f"a|b{n}"}} for n in range(40)]
    many = [{"prompt": "x", "n": 8, "temperature": 1.0}] * 32
    prompts = [{"url": "/v1/completions", "body": {"prompt": ["x"] * 64, "max_tokens": 2}}] * 2
    file.write_text("\n".join(map(json.dumps, [*forms, *many, *prompts])))
    done = cli("batch", str(file), "-o", str(out), "--model", str(tiny_folder),
               "--max-new-tokens", "8", "--max-batch-size", "24")  # fmt: skip
    assert done.exit_code == 0, (done.stderr, out.read_text()[:2000])
    entries = results_of(out)
    assert len(entries) == 74
    assert {entry["response"]["status_code"] for entry in entries.values()} == {200}
    choices = [len(entry["response"]["body"]["choices"]) for entry in entries.values()]
    assert sorted(choices) == [1] * 40 + [8] * 32 + [64] * 2


def test_an_engine_that_fails_ends_the_run_and_stores_nothing(
    cli: Run, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("one\ntwo\nthree\n")
    how = ("batch", str(file), "-o", str(out), "--model", str(tiny_folder), "--max-new-tokens", "8")
    with monkeypatch.context() as patch:
        patch.setattr(Service, "broken", True)
        done = cli(*how)
    assert done.exit_code == 2 and "the same command goes on" in done.stderr
    assert out.read_bytes() == b""
    assert cli(*how).exit_code == 0 and len(results_of(out)) == 3


def test_an_answer_that_cannot_be_told_is_an_error_of_its_line(
    cli: Run, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = Service.choice

    def refusing(self: Service, ask: Any, *given: Any) -> Any:
        return 1 / 0 if "two" in str(ask.prompts) else choice(self, ask, *given)

    monkeypatch.setattr(Service, "choice", refusing)
    file, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("one\ntwo\nthree\n")
    how = ("batch", str(file), "-o", str(out), "--model", str(tiny_folder), "--max-new-tokens", "8")
    assert cli(*how).exit_code == 1
    codes = {name: entry["response"]["status_code"] for name, entry in results_of(out).items()}
    assert codes == {"line-1": 200, "line-2": 500, "line-3": 200}


def test_settings_are_not_mixed(cli: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """Every setting that changes an answer stands beside it, and is compared."""
    file, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("one\ntwo\n")
    how = ("batch", str(file), "-o", str(out), "--model", str(tiny_folder),
           "--max-new-tokens", "16", "--block-length", "8")  # fmt: skip
    assert cli(*how).exit_code == 0
    written = out.read_bytes()
    for other, said in (
        (("-s", "localleap"), "sampler 'threshold', not 'localleap'"),
        (("-c", "dual"), "cache 'none', not 'dual'"), (("-m", "nano"), "model"),
        (("--dtype", "bfloat16"), "dtype 'auto', not 'bfloat16'"),
        (("--temperature", "1"), "another request"),
    ):  # fmt: skip
        done = cli(*how, *other)
        assert done.exit_code == 2 and said in done.stderr, done.stderr
    assert out.read_bytes() == written and cli(*how).exit_code == 0
    for nowhere in ("/dev/null", str(tmp_path)):
        assert "keeps no results" in cli("batch", str(file), "-o", nowhere).stderr


def test_progress_is_told_where_there_is_no_terminal(
    cli: Run, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dllm.cli.output.Ticker.__init__", lambda self: vars(self).update(
        every=0.0, again=0.0))  # fmt: skip
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n")
    done = cli("batch", str(file), "--model", str(tiny_folder), "--max-new-tokens", "8")
    assert "1 of 2 answered\n2 of 2 answered\n" in done.stderr


def holds(file: Path, count: int) -> bool:
    return file.exists() and file.read_bytes().count(b"\n") >= count


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Killed twice in the middle: nothing is lost, nothing is answered twice."""
    file, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("\n".join(f"Compute {a} + {a + 7}." for a in range(60)))
    command = [sys.executable, "-m", "dllm", "batch", str(file), "-o", str(out),
               "--max-batch-size", "4", "-s", "llada(steps=64)"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    counts = [0]
    for _ in range(2):
        run = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
        try:
            until(partial(holds, out, counts[-1] + 4), 120)
        finally:
            os.kill(run.pid, signal.SIGKILL)
            run.wait()
        counts.append(out.read_bytes().count(b"\n"))
    assert counts[2] < 60
    before = out.read_bytes()
    subprocess.run(command, check=True, capture_output=True, timeout=240, env=environment)
    assert out.read_bytes().startswith(before.rpartition(b"\n")[0])
    assert len(results_of(out)) == 60
