"""What `rate` learned about a machine and a pair of models, kept from call to call.

One small JSON file in the user's cache folder, of which every entry is one verifier with one
drafter.  It holds times and counts, never text, and may be deleted at any time.  ``DLLM_RATE``
names another file; where it is empty or names no file (``/dev/null``), nothing is read or written.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VERSION = 2  # of the file: others are ignored and replaced
MOST = 64  # entries; the one that was written longest ago goes first
EVERY = 5.0  # seconds between two writes of one controller


def memory_file() -> Path | None:
    """Where it is kept; None: nowhere."""
    named = os.environ.get("DLLM_RATE")
    if named is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "dllm" / "rate.json"
    nothing = not named or (os.path.exists(named) and not os.path.isfile(named))
    return None if nothing else Path(named)  # /dev/null is not to be replaced


@dataclass
class Memory:
    """One entry of the file: ``key`` says of what."""

    file: Path
    key: str
    written: float = -EVERY

    @classmethod
    def of(cls, verifier: Any, drafter: object, sampled: bool) -> Memory | None:
        """That of a verifier (`DiffusionModel`) and what drafts for it, on this machine with as
        many threads; texts that are ``sampled`` accept otherwise than greedy ones."""
        try:
            file = memory_file()
        except RuntimeError:  # there is no home
            return None
        if file is None or drafter is None:
            return None
        config = verifier.hf.config
        shape = (config.model_type, getattr(config, "num_hidden_layers", 0),
                 getattr(config, "hidden_size", 0))  # fmt: skip
        parts = (platform.node(), torch.get_num_threads(), str(verifier.device.type),
                 str(verifier.dtype), verifier.name, *shape, drafter, sampled)  # fmt: skip
        return cls(file, " ".join(map(str, parts))[:500])

    def read(self) -> dict[str, Any] | None:
        """What was learned, or None."""
        found = self._entries().get(self.key)
        return found if isinstance(found, dict) else None

    def write(self, learned: dict[str, Any]) -> None:
        """Replace the entry, at most every few seconds; a folder that cannot be written is none."""
        if time.monotonic() - self.written < EVERY:
            return
        self.written = time.monotonic()
        entries = self._entries()
        entries.pop(self.key, None)
        kept = dict([*entries.items(), (self.key, learned)][-MOST:])
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.file.parent, prefix=".rate-")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as out:
                    json.dump({"version": VERSION, "entries": kept}, out)
                os.replace(name, self.file)  # whole or not at all, whoever else writes
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise

    def _entries(self) -> dict[str, Any]:
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        entries: Any = content.get("entries") if isinstance(content, dict) else None
        right = isinstance(entries, dict) and content.get("version") == VERSION
        return dict(entries) if right else {}
