"""Where something was measured: versions and hardware; no host names, no paths."""

import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .. import __version__


def machine() -> dict[str, Any]:
    """What has to be known to compare times."""
    return {
        "cpu": _cpu(), "vector": torch.backends.cpu.get_cpu_capability(),
        "date": date.today().isoformat(), "cores": os.cpu_count(),
        "threads": torch.get_num_threads(), "load": _load(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(), "dllm": __version__,
        **{name: version(name) for name in ("torch", "transformers", "numpy")},
    }  # fmt: skip


def _load() -> float | None:
    """Processes that wanted to run during the last minute: what else the machine was doing."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):  # not on every system
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return (*names, platform.processor())[0]
