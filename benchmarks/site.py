"""What the documentation site needs of the source (a hook of mkdocs, see `mkdocs.yml`).

In a checkout four packages stand beside `dllm` and not in it, which a reader of the source that
does not import it cannot know: the API reference is made from a copy with the installed layout.
Examples in docstrings become code blocks.  What is declared of a parameter becomes its docstring.
"""

from __future__ import annotations

import ast
import re
import shutil
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from griffe import Docstring, Extension
from mkdocs.plugins import event_priority

ROOT = Path(__file__).parents[1]
EXAMPLE = re.compile(r"(?:^[ ]*>>>.*\n?(?:^(?!\s*$).*\n?)*)", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")
_copy = tempfile.TemporaryDirectory(prefix="dllm-docs-")


@event_priority(100)  # before mkdocstrings reads its options
def on_config(config: Any) -> Any:
    """Point mkdocstrings to a copy of the packages under their installed names."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    only_python = shutil.ignore_patterns("__pycache__", "*.json", "*.safetensors")
    for package, folder in table["tool"]["setuptools"]["package-dir"].items():
        target = Path(_copy.name, *package.split("."))
        shutil.copytree(ROOT / folder, target, ignore=only_python, dirs_exist_ok=True)
    facade = Path(_copy.name, "dllm", "__init__.py")
    # An import of its own subpackages hides them from griffe.
    facade.write_text(re.sub(r"    from \. import .*\n", "", facade.read_text(encoding="utf-8")))
    python = config["plugins"]["mkdocstrings"].config["handlers"]["python"]
    python["paths"] = [_copy.name]
    python["options"]["extensions"] = [f"{__file__}:Examples", f"{__file__}:Declarations"]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fences marked for `tests/test_documents.py` are Python like the others; links to files of
    the repository beside `docs/` become plain text."""
    markdown = markdown.replace("```python notest\n", "```python\n")
    return markdown if "/" in page.file.src_uri else OUTSIDE.sub(r"\1", markdown)


class Examples(Extension):
    """Doctests in docstrings as fenced code; outside of one ``>>>`` would be a quotation."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """``text`` with every doctest in a fence.

    >>> fenced("One.")
    'One.'
    """
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)


KINDS = {"Count": "int", "Number": "int", "Share": "float", "Scale": "float", "Bias": "float"}


class Declarations(Extension):
    """``Annotated[Count, about("Tokens per block.")]`` as an int with that docstring."""

    def on_attribute_instance(self, *, node: Any, attr: Any, **_: Any) -> None:
        parts = getattr(getattr(getattr(node, "annotation", None), "slice", None), "elts", [])
        for part in parts:
            if isinstance(part, ast.Call) and ast.unparse(part.func) == "about":
                attr.docstring = Docstring(ast.literal_eval(part.args[0]), parent=attr)
                attr.labels.clear()
                if str(attr.value).startswith("Field("):
                    attr.value = "{}"
                known = re.compile(rf"\b({'|'.join(KINDS)})\b")
                attr.annotation = known.sub(lambda found: KINDS[found[1]], ast.unparse(parts[0]))
