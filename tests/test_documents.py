"""Every Python block of the documents runs as it stands.

The blocks of a document run in order and share their names.  A block that cannot run, because it
needs files or models of the reader's, is fenced as ``python notest``.  A ``text`` block right
behind one is what it prints.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dllm
from dllm.cache import CACHES
from dllm.drafting import register_all
from dllm.drafting.base import DRAFTERS
from dllm.models import family as families
from dllm.samplers import SAMPLERS

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(
    r"^```python *(?P<mark>[^\n]*)\n(?P<code>.*?)^```(?:\n+```text\n(?P<output>.*?)^```)?",
    re.DOTALL | re.MULTILINE,
)


def blocks(text: str) -> Iterator[tuple[int, str, str, str | None]]:
    """(line of the first statement, mark, code, what it prints) of each block."""
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 2
        yield line, match["mark"].strip(), match["code"], match["output"]


def executable(document: Path) -> bool:
    return any(not mark for _, mark, *_ in blocks(document.read_text(encoding="utf-8")))


@pytest.fixture
def _registries() -> Iterator[None]:
    """What a document registers is gone afterwards."""
    register_all()  # drafters that a document is the first to use stay, too
    registries = CACHES, SAMPLERS, DRAFTERS
    tables: list[dict[str, Any]] = [*(r._entries for r in registries), families._FAMILIES]
    for registry in registries:
        list(registry)  # plug-ins come in now
    before = [set(table) for table in tables]
    yield
    for table, known in zip(tables, before, strict=True):
        for name in set(table) - known - set(families.OWN):
            del table[name]


@pytest.mark.usefixtures("_registries")
@pytest.mark.parametrize(
    "document",
    [pytest.param(path, id=str(path.relative_to(ROOT)), marks=[pytest.mark.slow] * (i > 0))
     for i, path in enumerate(filter(executable, DOCUMENTS))],
)  # fmt: skip
def test_its_blocks_run(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    names = ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", names)
    errors = ""
    for line, mark, code, output in blocks(document.read_text(encoding="utf-8")):
        if not mark:
            at = "\n" * (line - 1)  # so that errors name the line of the document
            exec(compile(at + code, str(document), "exec", dont_inherit=True), names.__dict__)
            printed = capsys.readouterr()
            errors += printed.err
            if output is not None:
                assert printed.out.strip() == output.strip(), f"{document.name}:{line}"
    assert "Traceback" not in errors


def test_marks_are_known() -> None:
    for document in DOCUMENTS:
        for line, mark, *_ in blocks(document.read_text(encoding="utf-8")):
            assert mark in ("", "notest"), f"{document.name}:{line}: {mark}"


def test_blocks_are_seen() -> None:
    text = "a\n```python\nx = 1\n```\n```python notest\ny\n```\n\n```text\n2\n```\n"
    assert list(blocks(text)) == [(3, "", "x = 1\n", None), (6, "notest", "y\n", "2\n")]


def test_every_public_name_has_its_place_in_the_api() -> None:
    page = (ROOT / "docs/reference/python-api.md").read_text(encoding="utf-8")
    for name in dllm.__all__:
        value = getattr(dllm, name)
        if isinstance(value, type) and issubclass(value, dllm.DllmError):
            continue  # all of them are listed by their module
        if not isinstance(value, ModuleType):
            assert re.search(rf"^::: dllm\.{name}$", page, re.M), name
