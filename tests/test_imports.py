"""What is imported when, and what it costs: each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HELP_SECONDS = 0.75  # of processor time; 0.37 measured, on a busy machine too


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_loading_nano_imports_its_own_network_and_no_other() -> None:
    program = (
        "import sys, dllm\n"
        "dllm.load('nano')\n"
        "names = {n.split('.')[2] for n in sys.modules if n.startswith('transformers.models.')}\n"
        "own = {n for n in sys.modules if n.startswith('dllm.models.')}\n"
        "print(*sorted(names))\n"
        "print(*sorted(n.rpartition('.')[2] for n in own))\n"
    )
    networks, own = (line.split() for line in run(program).splitlines())
    assert set(networks) <= {"auto", "llama"}
    others = {"a2d", "autoregressive", "block_causal", "dream", "llada2", "mixtures", "nemotron"}
    assert "llada" in own and not others & set(own)


def test_plain_data_needs_no_deep_learning_library() -> None:
    """With torch and transformers blocked, not merely unused."""
    program = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers'):\n"
        "            raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "import dllm, dllm.runtime.result, dllm.samplers, dllm.cache, dllm.runtime.trace\n"
        "import dllm.serve.reading, dllm.serve.responses\n"
        "dllm.samplers.compose('threshold'), dllm.cache.compose('none')\n"
        "dllm.Result, dllm.GenerationConfig()\n"
        "print('done')"
    )
    assert run(program) == "done"


def test_help_is_cheap() -> None:
    """Processor time of ``dllm --help``, the best of a few."""
    program = (
        "import resource, subprocess, sys\n"
        "def seconds():\n"
        "    used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "    return used.ru_utime + used.ru_stime\n"
        "best = 99.0\n"
        "for _ in range(4):\n"
        "    before = seconds()\n"
        "    subprocess.run([sys.executable, '-m', 'dllm', '--help'], check=True,\n"
        "                   stdout=subprocess.DEVNULL)\n"
        "    best = min(best, seconds() - before)\n"
        f"    if best < {HELP_SECONDS}:\n"
        "        break\n"
        "print(best)\n"
    )
    assert float(run(program)) < HELP_SECONDS


def test_help_imports_no_deep_learning_library() -> None:
    program = (
        "import sys\n"
        "from dllm.cli.app import app\n"
        "try:\n"
        "    app(['--help'], prog_name='dllm')\n"
        "except SystemExit:\n"
        "    pass\n"
        "print()\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub', 'pydantic'}\n"
        "print(*sorted(heavy & sys.modules.keys()) or ['none'])"
    )
    assert run(program).splitlines()[-1] == "none"


def test_the_table_of_families_is_what_their_modules_register() -> None:
    from dllm.models import families
    from dllm.models.family import OWN

    folder = Path(__file__).parents[1] / "dllm" / "models"
    defining = {file.stem for file in folder.glob("*.py") if " = Family(\n" in file.read_text()}
    assert defining == {module for module, _ in OWN.values()}
    for name, (_, architectures) in OWN.items():
        if name != "autoregressive":
            assert families()[name].architectures == architectures, name
    assert list(families())[: len(OWN)] == list(OWN)
