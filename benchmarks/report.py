"""Where and on what a benchmark ran, and its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dllm.eval.machine import machine

RESULTS = Path(__file__).parent / "results"


def write(path: Path, result: dict[str, Any]) -> None:
    """``result`` with the machine beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    print(f"wrote {path}")
