"""Preset files: a sampler, a cache and their arguments, as ``dllm tune`` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError

KEYS = {"sampler", "cache", "arguments"}


def read_preset(path: Path) -> dict[str, Any]:
    """``sampler``, ``cache`` and ``arguments`` of a preset file."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the preset {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the preset {path} is not JSON: {error}") from error
    missing = KEYS - set(result) if isinstance(result, Mapping) else KEYS
    if missing or not isinstance(result["arguments"], Mapping):
        lacking = ", ".join(sorted(missing)) or "arguments that are a mapping"
        raise ConfigError(f"the preset {path} lacks {lacking}: dllm tune writes complete ones")
    return {name: result[name] for name in KEYS}
