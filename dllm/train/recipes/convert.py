"""An autoregressive model that also fills in masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...models.adapters import SECTION


def save_gated(hf: Any, folder: Path, mask_token_id: int, **generation: Any) -> None:
    """Write the adapter of ``hf``, and what it is for; ``dllm.load(base, adapter=folder)``."""
    hf.save_pretrained(folder)  # of a network with an adapter, the adapter
    section = {"family": "gated", "mask_token_id": mask_token_id, "generation": generation}
    (folder / SECTION).write_text(json.dumps(section, indent=1) + "\n", encoding="utf-8")
