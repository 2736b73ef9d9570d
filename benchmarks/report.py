"""Where and on what a benchmark ran, and its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dllm.eval.machine import machine
from dllm.kernels import cpu

RESULTS = Path(__file__).parent / "results"


def kernels() -> str:
    """Whose kernels multiply on the CPU: those that `dllm doctor --compile` made, or PyTorch's."""
    return "PyTorch" if cpu.library() is None else "compiled"


def write(path: Path, result: dict[str, Any]) -> None:
    """``result`` with the machine beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"machine": machine(), "kernels": kernels(), **result}, indent=1) + "\n"
    )
    print(f"wrote {path}")
