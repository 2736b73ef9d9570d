"""Bad input: one line on stderr, exit code 2, no traceback."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.monkeypatch import MonkeyPatch

import dllm.models
from dllm.cli.app import ended_by_sigterm
from dllm.core.errors import missing_module

from ..thin import covering
from .conftest import Run

BAD = {
    "unknown sampler": (["--sampler", "treshold"], "did you mean 'threshold'"),
    "unknown cache": (["--cache", "duall"], "did you mean 'dual'"),
    "unreadable spec": (["--sampler", "threshold(tau="], "cannot read sampler"),
    "out of range": (["--top-p", "0"], "top_p must be above 0"),
    "too long": (["--max-new-tokens", "500"], "exceed the context of 128"),
    "option without a taker": (["--steps", "4"], "takes no steps"),
    "empty cache": (["-c", ""], "cannot read cache ''"),
    "other library": (["--stop", ""], "stop_strings must not be empty"),
    "digit of no number": (["--initial-text", "a b", "--remask", "²"], "--remask is a list"),
    "two constraints": (["--constraint", "3=a", "--constraint", "3=b"], "are about 3: keep one"),
    "two biases": (["--logit-bias", "3=1", "--logit-bias", "3=2"], "are about 3: keep one"),
    "dtype": (["--dtype", "float8"], "float8"),
    "device": (["--device", "abacus"], "device 'abacus' cannot be used"),
    "trace folder": (["--trace", "/no/such/folder/t.json"], "cannot write the trace"),
    "two prompts": (["--file", "prompt.txt"], "keep one of them"),
    "bundled name": (["--model", "nanoo"], "did you mean 'nano'"),
    "folder": (["--model", "/no/such/model"], "there is no folder"),
}


@pytest.mark.parametrize(("case", "watch"), covering(list(BAD), [False, True]))
def test_generate(cli: Run, tiny_folder: Path, case: str, watch: bool) -> None:
    options, message = BAD[case]
    defaults = ["--model", str(tiny_folder), "--max-new-tokens", "8"]
    result = cli("generate", "hello", *defaults, *options, *(["--watch"] if watch else []))
    check(result.exit_code, result.stdout, result.stderr, message)


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["generate", ""], "", "the prompt is empty"),
        (["generate"], "", "the prompt is empty"),
        (["generate", "-"], "\n \n", "the prompt is empty"),
        (["generate", "--file", os.devnull], "", f"{os.devnull} is empty"),
        (["generate", "--file", "/no/such/file"], "", "cannot read /no/such/file: No such file"),
        (["generate", "\udcff"], "", "not valid UTF-8"),
        (["infill", "no hole"], "", "there is no hole to fill"),
        (["infill", "a [[abc]]"], "", "'[[abc]]' is none"),
        (["infill", "a [[0]]"], "", "[[0]] is a hole of no tokens"),
        (["infill", "a [[0]] b [[2]]"], "", "[[0]] is a hole of no tokens"),
    ],
)
def test_prompts(ask: Run, arguments: list[str], stdin: str, message: str) -> None:
    result = ask(*arguments, stdin=stdin)
    check(result.exit_code, result.stdout, result.stderr, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "--model", "/no/such/model"], "there is no folder"),
        (["compare", "x", "-s", "treshold"], "did you mean 'threshold'"),
        (["compare", "x", "-c", "duall"], "did you mean 'dual'"),
        (["compare", ""], "the prompt is empty"),
        (
            ["generate", "x", "--verifier", "nano-ar", "--drafter", "promptlookup"],
            "unknown drafter 'promptlookup'; did you mean 'prompt_lookup'",
        ),
        (["doctor", "--selftest", "--model", "nano"], "--selftest reads no --model"),
        (["doctor", "--selftest", "--compile"], "compiles nothing"),
        (["serve", "nano", "--ray-host", "10.0.0.1"], "--replicas"),
        (["bench", "-t", "copy", "--no-plot", "-o", "/proc/x"], "/proc/x: No such file"),
        (["bench", "-t", "copy", "--no-plot", "-o", __file__], "File exists"),
    ],
)
def test_other_commands(cli: Run, arguments: list[str], message: str) -> None:
    result = cli(*arguments)
    check(result.exit_code, "", result.stderr, message)


def check(code: int, stdout: str, stderr: str, message: str) -> None:
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert message in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--top-q", "1"], "No such option: --top-q"),
        (["generate", "x", "--max-new-tokens", "abc"], "for '--max-new-tokens'"),
        (["--bogus"], "(see dllm --help)"),
        (["train", "deer", "--bogus"], "(see dllm train deer --help)"),
        (["paint"], "No such command 'paint'"),
    ],
)
def test_usage_errors(cli: Run, arguments: list[str], message: str) -> None:
    result = cli(*arguments)
    check(result.exit_code, result.stdout, result.stderr, message)


@pytest.mark.parametrize("arguments", [[], ["train"]])
def test_without_a_command_there_is_help(cli: Run, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2 and "Usage: dllm" in result.output


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(13, "Permission denied", "/some/file"), 2,
         "error: /some/file: Permission denied\n"),
        (dllm.DllmError("first\n  second"), 2, "error: first second\n"),
        (KeyboardInterrupt(), 130, "\n"),
    ],
)  # fmt: skip
def test_what_is_raised_leaves_as_one_line(
    cli: Run, monkeypatch: MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(dllm.models, "load", fail)
    result = cli("generate", "x")
    assert (result.exit_code, result.stderr) == (code, said)


@pytest.mark.parametrize("content", ["folder", b"\xff\xfe\n", b"[" * 100_000 + b"\n"])
def test_results_that_cannot_be_read(cli: Run, tmp_path: Path, content: str | bytes) -> None:
    file = tmp_path / "results.jsonl"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.mkdir()
    result = cli("bench", "-t", "copy", "-n", "1", "--no-plot", "-o", str(tmp_path))
    check(result.exit_code, result.stdout, result.stderr, "results.jsonl")


@pytest.mark.parametrize(
    "arguments",
    [["--debug", "generate", "x", "-s", "no"], ["generate", "x", "-s", "no", "--debug"]],
)
def test_debug_shows_the_traceback(cli: Run, tiny_folder: Path, arguments: list[str]) -> None:
    result = cli(*arguments, "--model", str(tiny_folder), "--max-new-tokens", "8")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: unknown sampler 'no'")


def many_prompts(folder: Path) -> tuple[list[str], Path]:
    """A command that answers 400 prompts, and the file it writes."""
    file, out = folder / "prompts.txt", folder / "out.jsonl"
    file.write_text("\n".join(f"Compute {a} + {a + 7}." for a in range(400)))
    more = ["-o", str(out), "--max-batch-size", "2", "-s", "llada(steps=32)"]
    return ["batch", str(file), *more], out


def wait_for_answers(out: Path, running: Callable[[], bool]) -> None:
    end = time.monotonic() + 90
    while not (out.exists() and out.read_bytes().count(b"\n") > 2):
        assert time.monotonic() < end and running()
        time.sleep(0.02)


def test_sigterm_ends_with_a_sentence(cli: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """As Ctrl-C does: how far it came, and how to go on."""
    arguments, out = many_prompts(tmp_path)
    ended = threading.Event()

    def terminate() -> None:
        wait_for_answers(out, lambda: not ended.is_set())
        os.kill(os.getpid(), signal.SIGTERM)

    assert threading.current_thread() is threading.main_thread(), "signals arrive there"
    thread = threading.Thread(target=terminate)
    thread.start()
    try:
        done = cli(*arguments, "--model", str(tiny_folder))
    finally:
        ended.set()
        thread.join()
    check_terminated(done.exit_code, done.stderr)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_sigterm_ends_a_forked_worker_without_a_word() -> None:
    """As `multiprocessing.Pool.terminate` does in what a command runs."""
    with ended_by_sigterm():
        reading, writing = os.pipe()
        worker = os.fork()
        if not worker:
            try:
                os.write(writing, b"1")
                time.sleep(60)
            finally:  # only where something was raised
                os._exit(1)
        os.read(reading, 1)
        os.kill(worker, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 143


def check_terminated(code: int, said: str) -> None:
    assert code == 143
    assert "of 400 answered" in said and "Traceback" not in said
    assert said.rstrip().endswith("ended by SIGTERM")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("/no", "--sampler", "foo"), "unknown sampler 'foo'"),  # the model would be said first
        (("/no", "--cache", "foo"), "unknown cache 'foo'"),
        (("/no", "--drafter", "promt_lookup"), "promt_lookup"),
        (("/no", "--log-level", "loud"), "unknown log level"),
        (("/no", "--tool-parser", "hermess"), "unknown tool parser"),
        (("nano-ar", "--sampler", "localleap"), "nano-ar is autoregressive: drop --sampler"),
        (("nano", "--drafter", "prompt_lookup"), "nano is a diffusion model"),
        (("nano", "--sampler", "prophet", "--cache", "elastic"), "prophet needs"),
    ],
)
def test_a_server_does_not_start_with_what_it_would_refuse(
    cli: Run, arguments: tuple[str, ...], word: str
) -> None:
    done = cli("serve", *arguments, "--port", "0")
    assert done.exit_code == 2 and word in done.stderr, done.stderr


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dllm.cli.options.Loading.load_model", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = cli("serve", "nano", "--port", str(taken.getsockname()[1]))
    assert done.exit_code == 2 and "in use): choose another --host or --port" in done.stderr


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("starlette.requests", "serve"),
        ("lm_eval", "eval"),
        ("torch", None),
        ("dllm.nothing", None),
    ],
)
def test_a_module_of_an_extra_is_asked_for_by_the_extra(module: str, extra: str | None) -> None:
    told = missing_module(ModuleNotFoundError(name=module))
    assert (told is None) == (extra is None)
    if extra is not None:
        assert f"'.[{extra}]'" in str(told)


def test_a_command_without_its_extra_is_one_line(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dllm.serve.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    result = cli("serve", "nano", "--replicas", "2")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: ray is missing: pip install -c constraints.txt '.[ray]'"
    )
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "command", [("generate", "Hi"), ("compare", "Hi"), ("infill", "a[[3]]"), ("chat",)], ids=str
)
def test_misspelt_parts_are_told_before_a_model_is_loaded(
    cli: Run, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dllm.cli.options.Loading.load_model", None)
    for option, value, meant in (("-s", "lada", "llada"), ("-c", "duall", "dual")):
        result = cli(*command, option, value)
        assert result.exit_code == 2 and f"did you mean '{meant}'" in result.stderr
