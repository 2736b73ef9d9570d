"""Processes of Python that this one starts."""

from __future__ import annotations

import os
import sys


def command(module: str, function: str, *arguments: str) -> list[str]:
    """A Python that finds modules where this one does, and calls ``function`` of ``module``.

    The path is set when it has started: a folder of the user's may hold an ``enum.py``.
    """
    path = [folder or os.getcwd() for folder in sys.path]
    start = f"import sys; sys.path[:] = {path}; from {module} import {function}; {function}()"
    return [sys.executable, "-c", start, *arguments]
