"""Lossless drafting: diffusion models and lookups propose, an autoregressive model verifies.

`dllm.speculate` is the way in.  See docs/speculative-decoding.md.
"""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ..core.spec import Info, info

if TYPE_CHECKING:
    from .api import speculate, stream_speculate
    from .base import Budget, Distribution, Draft, Drafter, Drafting, DraftRequest, Feedback
    from .drafters.diffusion import DiffusionDrafter
    from .result import SpeculativeResult

_WHERE = {
    "speculate": "api", "stream_speculate": "api",
    "SpeculativeResult": "result", "DiffusionDrafter": "drafters.diffusion",
    "Budget": "base", "Draft": "base", "Drafter": "base", "Drafting": "base", "Feedback": "base",
    "Distribution": "base", "DraftRequest": "base",
}  # fmt: skip
FOLDERS = ("accept", "drafters", "search", "length")  # of parts, a file per method

__all__ = [
    "Budget", "DiffusionDrafter", "Draft", "Drafter", "Drafting", "Feedback", "Distribution",
    "DraftRequest", "SpeculativeResult", "available", "speculate", "stream_speculate",
]  # fmt: skip


@cache
def register_all() -> None:
    """Import every module that registers parts."""
    for folder in FOLDERS:
        for file in iter_modules(import_module(f".{folder}", __name__).__path__):
            import_module(f".{folder}.{file.name}", __name__)
    import_module(".dflash.drafter", __name__)


def available() -> list[Info]:
    """Every registered part, by role and name."""
    register_all()
    from . import base
    from .length import control
    from .search import chains as search

    registries: tuple[Any, ...] = (base.DRAFTERS, search.SEARCHES, control.CONTROLLERS, base.RULES)
    return [info(kinds[name], kinds.kind) for kinds in registries for name in sorted(kinds)]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module 'dllm.drafting' has no attribute {name!r}")
