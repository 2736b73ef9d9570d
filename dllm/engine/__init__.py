"""The engine: canvases in, one forward per step for all of them, decisions out."""

from __future__ import annotations

from .loop import Engine, Step, check_pair

__all__ = ["Engine", "Step", "check_pair"]
