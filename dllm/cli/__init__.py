"""The command line.  Importing this package imports neither torch nor transformers."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the ``dllm`` command."""
    code: str | int | None = 0
    try:
        from .app import app

        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a terminal without Unicode shows '?', not a crash
                stream.reconfigure(errors="replace")
        app(prog_name="dllm")
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code
    sys.exit(_flush(code))


def _flush(code: str | int | None) -> str | int | None:
    """Write what stdout still holds: a full disk may be found only now.  The exit status."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no second try at exit
        if not code and not isinstance(error, BrokenPipeError):
            from .output import complain

            complain(error)
        return code or 2
    return code
