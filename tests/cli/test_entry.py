"""The installed command: start-up, exit codes, and a whole run in a process of its own."""

import gc
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dllm
from dllm.cli import batch, chat, dflash, evaluate, generate, infill, main, serve, train
from dllm.cli.app import COMMANDS, command_of

from ..thin import some
from .conftest import Run

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}


def python(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], input=stdin, capture_output=True, text=True,
        encoding="utf-8", env=ENVIRONMENT, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_watched_run_in_its_own_process(tiny_folder: Path) -> None:
    options = ["--model", str(tiny_folder), "--max-new-tokens", "24", "--block-length", "8"]
    done = python("-m", "dllm", "generate", "--watch", "--json", *options, stdin="Tom and Anna\n")
    assert done.returncode == 0
    assert json.loads(done.stdout)["nfe"] == done.stderr.count("row 0 step")
    assert "«" in done.stderr and "‹" in done.stderr and "░" in done.stderr


@pytest.mark.slow
def test_a_file_with_a_sampler_of_its_own_has_the_commands(
    tmp_path: Path, tiny_folder: Path
) -> None:
    """As the page on extending says."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import dllm.samplers as samplers\n"
        "@samplers.register('mine')\n"
        "class Mine(samplers.Selector):\n"
        "    def select(self, view): return view.score >= 0\n"
        "if __name__ == '__main__':\n"
        "    from dllm.cli import main\n"
        "    main()\n"
    )
    run = ["generate", "--json", "--model", str(tiny_folder), "--max-new-tokens", "8"]
    done = python(str(file), *run, "--sampler", "mine", "Tom")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nfe"] == 1


@pytest.mark.slow
def test_a_line_that_is_no_text_is_refused_and_the_next_is_read(tiny_folder: Path) -> None:
    run = [sys.executable, "-m", "dllm", "chat", "--model", str(tiny_folder)]
    done = subprocess.run(
        [*run, "--max-new-tokens", "8"], input=b"caf\xe9\nTom\n", capture_output=True,
        env=ENVIRONMENT, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout
    assert b"error: the prompt is not valid Unicode" in done.stderr


def test_the_end_of_a_command_is_not_searched_for_garbage() -> None:
    """All that torch and transformers have made would be looked through once more."""
    told = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000))"
    done = python("-c", f"{told}; from dllm.cli import main; main()", "--version")
    assert (done.returncode, done.stdout) == (0, f"dllm {dllm.__version__}\nTrue\n")


def test_the_version() -> None:
    done = python("-m", "dllm", "--version")
    assert done.stdout == f"dllm {dllm.__version__}\n"


@pytest.mark.parametrize("command", [name for group in COMMANDS.values() for name in group])
def test_every_command_has_help(cli: Run, command: str) -> None:
    result = cli(command, "--help")
    assert result.exit_code == 0 and f"Usage: dllm {command}" in result.stdout
    assert "[default: ()]" not in result.stdout


def test_the_list_of_commands_begins_with_an_example(cli: Run) -> None:
    shown = cli("--help").stdout
    assert shown.index("dllm compare -s llada") < min(map(shown.index, COMMANDS))
    assert [*COMMANDS] == sorted(COMMANDS, key=shown.index)


def options_in(page: str) -> set[str]:
    """The long options of a help page."""
    return set(re.findall(r"^│ [* ]?\s*(--[a-z0-9-]+)", page, re.M)) - {"--help", "--help-all"}


HELPED = ["generate", "chat", "infill", "batch", "serve", "eval", "train dflash", "train parallel",
          "train convert"]  # fmt: skip


@pytest.mark.parametrize("named", some(HELPED, 3))
def test_help_shows_a_dozen_options_and_help_all_the_rest(cli: Run, named: str) -> None:
    command = named.split()
    few, every = (options_in(cli(*command, page).stdout) for page in ("--help", "--help-all"))
    assert 10 <= len(few) <= 16 and few < every
    assert {"--debug", "--threads"} <= every and cli(*command, "--help-all").exit_code == 0
    again = options_in(cli(*command, "--help").stdout)
    assert again == few  # showing all changes nothing


def test_what_help_shows_is_an_option() -> None:
    for module in (generate, chat, infill, batch, serve, evaluate):
        name = "eval" if module is evaluate else module.__name__.rpartition(".")[2]
        assert {*module.SHOWN} <= {option.name for option in command_of(name).params}, name
    for name, module in (("dflash", dflash), ("parallel", train), ("convert", train)):
        known = {option.name for option in command_of("train").commands[name].params}
        assert {*module.SHOWN} - known == ({"recipe", "rank"} if name == "convert" else set()), name


def written() -> list[tuple[str, str]]:
    """Pages, and every command in their code, without ``dllm``."""
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *root.glob("examples/*/*.md")]
    found = []
    for page in pages:
        text = page.read_text("utf-8").replace("\\\n", " ")
        blocks = re.findall(r"^```([\w ]*)\n(.*?)^```", text, re.S | re.M)
        shell = [body for kind, body in blocks if kind in ("", "bash")]
        lines = [*"".join(shell).splitlines(), *re.findall(r"`(dllm [^`]*)`", text)]
        found += [(page.name, line[5:]) for line in lines if line.startswith("dllm ")]
    return found


def test_commands_on_pages_exist_and_so_do_their_options() -> None:
    names = {name for group in COMMANDS.values() for name in group}
    assert len(written()) > 60
    for page, line in written():
        name, *rest = re.sub(r'"[^"]*"', "TEXT", line).split()
        command = command_of(name) if name in names else None
        if name == "train" and rest and rest[0] != "...":
            command = command.commands.get(rest.pop(0))
        assert command is not None, f"{page}: dllm {line}"
        known = {option for each in command.params for option in each.opts}
        given = {word for word in rest if re.match(r"--?[a-z]", word)}
        assert given <= known, f"{page}: dllm {line}"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(
    "arguments",
    [("--version",), pytest.param(("generate", "Tom"), marks=pytest.mark.slow)],
)
def test_a_full_disk_is_told_in_one_line(tiny_folder: Path, arguments: tuple[str, ...]) -> None:
    model = ["--model", str(tiny_folder), "--max-new-tokens", "8"] if len(arguments) > 1 else []
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dllm", *arguments, *model], stdout=full, env=ENVIRONMENT,
            stderr=subprocess.PIPE, text=True, encoding="utf-8", timeout=120, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


def test_the_hole_in_the_help_is_shown(cli: Run) -> None:
    assert "[[8]]" in cli("infill", "--help").stdout


@pytest.mark.skipif(os.name != "posix", reason="the syntax of a POSIX shell")
@pytest.mark.parametrize(
    ("command", "code", "stderr"),
    [
        ("--version >&-", 0, ""),
        pytest.param("samplers 2>&-", 0, "", marks=pytest.mark.slow),
        pytest.param("generate <&-", 2, "error: the prompt is empty", marks=pytest.mark.slow),
        pytest.param("generate <&- >&- 2>&-", 2, "", marks=pytest.mark.slow),
        pytest.param("chat --nonsense <&- 2>&-", 2, "", marks=pytest.mark.slow),
    ],
)
def test_streams_that_the_shell_has_closed(command: str, code: int, stderr: str) -> None:
    shell = f'exec "$0" -m dllm {command}'
    done = subprocess.run(
        ["/bin/sh", "-c", shell, sys.executable], env=ENVIRONMENT, capture_output=True,
        stdin=subprocess.DEVNULL, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == code and done.stderr.startswith(stderr)
    assert "Traceback" not in done.stderr + done.stdout


def test_files_and_pipes_are_utf8_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters that its code page lacks were once written as '?'."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(gc, "freeze", list)
    monkeypatch.setattr("dllm.cli.app.app", lambda prog_name: print("漢字"))
    with pytest.raises(SystemExit):
        main()
    assert out.buffer.getvalue() == "漢字\n".encode()
