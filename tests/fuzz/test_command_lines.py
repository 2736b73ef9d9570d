"""Random command lines: an answer, or one line that says what to do; never a traceback."""

import random
from pathlib import Path

import pytest

from ..cli.conftest import Run, cli  # noqa: F401
from .seeds import case_of

VALUES = ["", " ", "0", "1", "-1", "3", "0.5", "1e39", "nan", "inf", "None", "x", "a,b", "\udc80",
          "é", "'", "(", "[[2]]", "threshold", "dual", "nosuch", "9" * 30, "--", "{", "/no/such",
          "threshold(", "lopa(localleap)", "0=Tom", "0=", "=x", "first_commit", "\0"]  # fmt: skip
COMMON = ["--sampler", "--cache", "--steps", "--block-length", "--temperature", "--top-p",
          "--top-k", "--cfg-scale", "--eos-policy", "--seed", "--max-batch-tokens",
          "--device", "--dtype", "--top-candidates", "--cuda-graphs", "--json",
          "--nonsense"]  # fmt: skip
MORE = {
    "generate": [*COMMON, "--max-new-tokens", "--min-new-tokens", "--stop", "--constraint",
                 "--watch", "--raw", "--file", "--rule", "--max-batch-size"],
    "chat": [*COMMON, "--system", "--max-new-tokens", "--stop"],
    "infill": COMMON,
    "compare": ["--sampler", "--cache", "--temperature", "--seed", "--block-length", "--json"],
    "samplers": ["--nonsense"],
    "caches": ["--nonsense"],
    "bench": ["--sampler", "--tasks", "--examples", "--preset", "--rows"],
}  # fmt: skip
FLAGS = {"--json", "--watch", "--raw", "--cuda-graphs"}
TEXTS = ["Tom", "Reverse this list: Tom, Anna", "a[[2]]b", "", "[[1]]\udc80", "Tom\n\nAnna"]


def line(seed: int, folder: Path) -> tuple[list[str], str]:
    """Arguments, and what stands on standard input."""
    rng = random.Random(seed)
    command = rng.choice(["generate"] * 4 + ["infill"] * 2 + list(MORE))
    arguments = [command]
    if command not in ("chat", "bench") and rng.random() < 0.7:
        arguments.append(rng.choice(TEXTS + VALUES))
    for name in rng.sample(MORE[command], min(rng.randint(0, 3), len(MORE[command]))):
        arguments += [name] if name in FLAGS else [name, rng.choice(VALUES)]
    if command in ("generate", "chat", "infill", "compare", "bench"):
        arguments += ["--model", str(folder)]
    if command in ("generate", "chat", "compare"):
        arguments += ["--max-new-tokens", "8"]
    if command == "bench":
        arguments += ["--output", "/no/such/folder/x"]  # nothing is measured
    return arguments, rng.choice(TEXTS).encode("utf-8", "replace").decode()


@pytest.mark.fuzz(20)
def test_a_command_line(cli: Run, tiny_folder: Path, seeds: range) -> None:  # noqa: F811
    for seed in seeds:
        arguments, stdin = line(seed, tiny_folder)
        with case_of(seed, f"dllm {' '.join(map(ascii, arguments))}"):
            result = cli(*arguments, stdin=stdin)
            assert isinstance(result.exception, SystemExit | None), result.output[-500:]
            assert result.exit_code in (0, 2) and "Traceback" not in result.output
            if result.exit_code == 2:
                last = result.stderr.splitlines()[-1]
                assert last.startswith("error: ") and len(last) < 1000, last
