"""The command line.  Importing this package imports neither torch nor transformers."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the ``dllm`` command."""
    try:
        from .app import app

        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a terminal without Unicode shows '?', not a crash
                stream.reconfigure(errors="replace")
        app(prog_name="dllm")
    except KeyboardInterrupt:
        sys.exit(130)
