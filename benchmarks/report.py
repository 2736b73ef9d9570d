"""Where and on what a benchmark ran, and its JSON."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Versions and hardware; no host names, no paths."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x.split(":", 1)[1] for x in info.read_text().splitlines() if "model name" in x]
        cpu = names[0].strip() if names else cpu
    packages = ("dllm", "torch", "transformers", "numpy")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """``result`` with the machine beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    print(f"wrote {path}")
