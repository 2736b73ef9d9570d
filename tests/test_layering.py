"""Who may know whom: the arrows between the rooms, read from the source."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = SETTINGS["tool"]["setuptools"]["package-dir"]  # package -> folder
BARE = {folder for package, folder in FOLDERS.items() if package != folder}

# Room: the rooms that it may import, from the ground up, and the libraries; "*": any.
ENGINE = "core samplers cache kernels models structured"
ROOMS = {
    "core": ("", "numpy pydantic"),
    "samplers": ("core", "numpy"),
    "cache": ("core", "numpy"),
    "kernels": ("core", "numpy torch triton"),
    "models": ("core kernels", "torch transformers safetensors tokenizers huggingface_hub numpy "
               "einops psutil peft gguf"),
    "structured": ("core kernels", "numpy"),
    "engine": (ENGINE, "numpy torch transformers einops psutil"),
    "request": (f"{ENGINE} engine", "numpy torch transformers jinja2"),
    "likelihood": (f"{ENGINE} engine request", "numpy torch"),
    "runtime": (f"{ENGINE} engine request", "numpy torch"),
    "drafting": (f"{ENGINE} engine request runtime likelihood", "*"),
    "api": (f"{ENGINE} engine request runtime likelihood drafting", ""),
    "session": (f"{ENGINE} engine request runtime likelihood drafting", ""),
    "tasks": ("", ""),  # of eval; training needs them, so they stand on their own
    "eval": (f"{ENGINE} engine request runtime likelihood drafting api session tasks", "*"),
    "serve": (f"{ENGINE} engine request runtime likelihood drafting api session eval", "*"),
    "train": (f"{ENGINE} engine request runtime likelihood drafting api session eval tasks", "*"),
    "cli": ("*", "*"),
    "nano": ("", ""),
    "dllm": ("*", ""),  # the façade, whose names are imported when they are used
}  # fmt: skip
LAZY = {"dllm", "dllm.drafting"}  # packages whose names are imported when they are used


def modules() -> dict[str, Path]:
    """Every module of the library by its installed name."""
    result = {}
    for package, folder in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            inner = file.relative_to(ROOT / folder).with_suffix("").parts
            result[".".join((package, *(part for part in inner if part != "__init__")))] = file
    return result


MODULES = modules()
SOURCES = {name: file.read_text(encoding="utf-8") for name, file in MODULES.items()}
PACKAGES = {name for name, file in MODULES.items() if file.name == "__init__.py"}


def room_of(module: str) -> str:
    if module == "dllm.eval.tasks" or module.startswith("dllm.eval.tasks."):
        return "tasks"
    room = module.split(".")[1] if "." in module else module
    return "cli" if room == "__main__" else room


@cache
def imports(module: str, source: str) -> list[tuple[int, str]]:
    """(line, full module name) of every import, wherever in the file it stands."""
    return [*_imports(module, source)]


def _imports(module: str, source: str) -> Iterator[tuple[int, str]]:
    package = module if module in PACKAGES else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            parents = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                if (base, alias.name) != ("dllm", "__version__"):
                    inner = f"{base}.{alias.name}"
                    yield node.lineno, inner if inner in MODULES else base


def violations(module: str, source: str) -> list[str]:
    """One sentence per import that points the wrong way."""
    here, result = room_of(module), []
    rooms, libraries = (names.split() for names in ROOMS[here])
    for line, target in imports(module, source):
        top = target.split(".")[0]
        if top in BARE:
            result.append(f"{module}:{line} imports {target}: its name is dllm.{target}")
        elif top == "dllm":
            if room_of(target) not in [here, *rooms] and "*" not in rooms:
                result.append(f"{module}:{line} imports {target}, which {here} may not know")
        elif top not in sys.stdlib_module_names and not {top, "*"} & {*libraries}:
            result.append(f"{module}:{line} imports {target}, but {here} does without {top}")
    return result


def test_every_import_follows_the_arrows() -> None:
    result = [line for name, source in SOURCES.items() for line in violations(name, source)]
    assert not result, "\n" + "\n".join(result)


def test_the_table_of_rooms_is_complete_and_points_down() -> None:
    assert {room_of(name) for name in MODULES} == ROOMS.keys()
    below: set[str] = set()
    for room, (rooms, _) in ROOMS.items():
        assert "*" in rooms or {*rooms.split()} <= below, room
        below.add(room)


def test_files_form_no_circle() -> None:
    """Wherever in them an import stands; packages that hand names on lazily are left out."""
    graph: dict[str, set[str]] = {}
    for name in SOURCES.keys() - LAZY:
        found = graph.setdefault(name, set())
        for _, target in imports(name, SOURCES[name]):
            while target not in MODULES and "." in target:
                target = target.rpartition(".")[0]
            if target in MODULES.keys() - LAZY - {name}:
                found.add(target)
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_few_files_lie_at_the_root() -> None:
    assert len([*(ROOT / "dllm").glob("*.py")]) <= 8


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dllm.samplers.mine", "from ..engine import Engine"),
        ("dllm.samplers.mine", "from .. import engine"),
        ("dllm.samplers.mine", "import torch.nn.functional as F"),
        ("dllm.samplers.mine", "from dllm.cache import Plan"),
        ("dllm.samplers", "from ..cache import Plan"),
        ("dllm.cache.mine", "def plan():\n    import transformers"),
        ("dllm.cache.mine", "def plan():\n    from ..api import generate"),
        ("dllm.cache.mine", "if TYPE_CHECKING:\n    from ..models import DiffusionModel"),
        ("dllm.core.canvas", "from ..samplers import NOTHING"),
        ("dllm.core.spec", "import torch"),
        ("dllm.kernels.mine.torch", "from ...cache import Plan"),
        ("dllm.models.mine", "import dllm"),
        ("dllm.models.mine", "from ..samplers.base import Prediction"),
        ("dllm.engine.loop", "from ..api import generate"),
        ("dllm.request.mine", "from ..runtime.result import Result"),
        ("dllm.runtime.mine", "def speculate():\n    from ..drafting import draft"),
        ("dllm.runtime.result", "from ..cli.output import show"),
        ("dllm.eval.bench", "from ..cli.output import show"),
        ("dllm.eval.tasks.mine", "import numpy as np"),
        ("dllm.eval.tasks.mine", "from ..bench import run"),
        ("dllm.cli.mine", "from samplers import compose"),
    ],
)
def test_a_reversed_arrow_is_found(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dllm.samplers.mine", "import numpy as np\nfrom ..core.canvas import Canvas"),
        ("dllm.samplers.mine", "import math\nfrom .base import Selector"),
        ("dllm.cache", "from . import block, none"),
        ("dllm.engine.loop", "from ..samplers.compose import check_needs"),
        ("dllm.models.saving", "from .. import __version__"),
        ("dllm.train.mine", "from ..eval.tasks import TASKS"),
        ("dllm.serve.mine", "from ..api import stream"),
        ("dllm.cli.mine", "def serve():\n    from ..serve import app"),
    ],
)
def test_a_proper_arrow_is_not(module: str, source: str) -> None:
    assert not violations(module, source)
