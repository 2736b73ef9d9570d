"""Who may know whom: the arrows between the packages, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
FOLDERS: dict[str, str] = TABLE["package-dir"]  # package -> folder
BARE = {folder for package, folder in FOLDERS.items() if package != folder}

GROUND = {"errors", "capabilities", "limits", "registry", "spec"}
POLICY = (GROUND | {"canvas"}, {"numpy"})

# unit -> (units of dllm, third parties) it may import.  A unit is a module or a package directly
# below dllm; "dllm" is the façade, whose lazy table of names points everywhere.
RULES: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "capabilities": (set(), set()),
    "limits": ({"errors"}, set()),
    "registry": ({"errors"}, set()),
    "spec": ({"errors", "registry"}, set()),
    "canvas": (set(), {"numpy"}),
    "samplers": POLICY,
    "cache": POLICY,
    "kernels": ({"errors"}, {"numpy", "torch", "triton"}),
    "models": (
        {"errors", "registry", "spec", "kernels"},
        {"torch", "transformers", "safetensors", "tokenizers", "huggingface_hub", "numpy"}
        | {"einops", "psutil", "peft", "gguf"},  # the last two where such a file is met
    ),
    "declared": ({"errors"}, {"pydantic"}),
    "config": ({"errors", "declared"}, {"pydantic"}),
    "memory": (set(), {"torch", "psutil"}),
    "work": ({"errors", "canvas", "memory"}, {"torch"}),
    "prefixes": ({"canvas", "memory"}, {"numpy"}),
    "formats": ({"errors", "canvas", "kernels"}, {"numpy", "outlines_core"}),
    "engine": (
        GROUND
        | {
            "canvas",
            "samplers",
            "cache",
            "kernels",
            "models",
            "config",
            "declared",
            "work",
            "formats",
            "memory",
            "prefixes",
        },
        {"numpy", "torch", "transformers", "einops"},
    ),
    "trace": ({"canvas", "engine", "errors"}, set()),
    "result": ({"canvas", "errors", "trace"}, {"numpy"}),
    "text": (set(), set()),
    "prompts": ({"errors", "canvas", "models"}, {"numpy", "torch", "transformers", "jinja2"}),
    "eval.tasks": (set(), set()),  # training needs it: it stands on its own
}
LAZY = {"dllm", "dllm.drafting"}  # packages whose names are imported when they are used
# What users run.  Nothing below imports these; what has no rule (api, result, trace, ...) is below.
ON_TOP = {"dllm", "cli", "drafting", "eval", "kinds", "serve", "session", "train"}


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


def unit_of(module: str) -> str:
    if module == "dllm.eval.tasks" or module.startswith("dllm.eval.tasks."):
        return "eval.tasks"
    unit = module.split(".")[1] if "." in module else module
    return "cli" if unit == "__main__" else unit


def allowed(here: str, there: str) -> bool:
    """Whether unit ``here`` may import unit ``there``."""
    if here == there or here in ("cli", "dllm"):
        return True
    if here in RULES:
        return there in RULES[here][0]
    return there != "cli" if here in ON_TOP else there not in ON_TOP


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
    here, result = unit_of(module), []
    _, outside = RULES.get(here, (None, None))
    for line, target in imports(module, source):
        top = target.split(".")[0]
        if top in BARE:
            result.append(f"{module}:{line} imports {target}: its name is dllm.{target}")
        elif top == "dllm":
            if not allowed(here, unit_of(target)):
                result.append(f"{module}:{line} imports {target}, which {here} may not know")
        elif outside is not None and top not in outside | sys.stdlib_module_names:
            result.append(f"{module}:{line} imports {target}, but {here} does without {top}")
    return result


def test_every_import_follows_the_arrows() -> None:
    result = [line for name, source in SOURCES.items() for line in violations(name, source)]
    assert not result, "\n" + "\n".join(result)


def test_the_arrows_form_no_circle() -> None:
    """Between units; the façade refers to everything lazily and is left out."""
    graph: dict[str, set[str]] = {}
    for name, source in SOURCES.items():
        targets = {unit_of(t) for _, t in imports(name, source) if t.split(".")[0] == "dllm"}
        graph.setdefault(unit_of(name), set()).update(targets - {unit_of(name), "dllm"})
    graph.pop("dllm")
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_files_form_no_circle() -> None:
    """Nor do single files, wherever in them an import stands; packages that hand names on lazily
    (`dllm`, `dllm.drafting`) are left out."""
    graph: dict[str, set[str]] = {}
    for name in SOURCES.keys() - LAZY:
        found = graph.setdefault(name, set())
        for _, target in imports(name, SOURCES[name]):
            while target not in MODULES and "." in target:
                target = target.rpartition(".")[0]
            if target in MODULES.keys() - LAZY - {name}:
                found.add(target)
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_every_rule_is_about_something() -> None:
    units = {unit_of(name) for name in MODULES}
    assert RULES.keys() <= units
    assert units > {"dllm", "api", "cli", "train"}


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
        ("dllm.canvas", "from .errors import DllmError"),
        ("dllm.spec", "import numpy as np"),
        ("dllm.kernels.mine.torch", "from ...canvas import Canvas"),
        ("dllm.models.mine", "import dllm"),
        ("dllm.models.mine", "from ..samplers.base import Prediction"),
        ("dllm.engine.loop", "from ..api import generate"),
        ("dllm.api", "def speculate():\n    from .drafting import draft"),
        ("dllm.result", "from .cli.output import show"),
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
        ("dllm.samplers.mine", "import numpy as np\nfrom ..canvas import Canvas"),
        ("dllm.samplers.mine", "import math\nfrom .base import Selector"),
        ("dllm.cache", "from . import block, none"),
        ("dllm.engine.loop", "from ..samplers.compose import check_needs"),
        ("dllm.models.saving", "from .. import __version__"),
        ("dllm.api", "from rich.console import Console"),
        ("dllm.train.mine", "from ..eval.tasks import TASKS"),
        ("dllm.serve.mine", "import dllm\nfrom ..api import stream"),
        ("dllm.cli.mine", "def serve():\n    from ..serve import app"),
    ],
)
def test_a_proper_arrow_is_not(module: str, source: str) -> None:
    assert not violations(module, source)


def test_policies_run_without_a_deep_learning_library() -> None:
    """What the source says, the interpreter confirms."""
    program = (
        "import sys, dllm, dllm.samplers, dllm.cache, dllm.eval.tasks\n"
        "dllm.samplers.compose('threshold'), dllm.cache.compose('none')\n"
        "print(*sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
