"""The command line.  Importing this package imports neither torch nor transformers."""

import gc
import os
import sys


def main() -> None:
    """Entry point of the ``dllm`` command."""
    code: str | int | None = 0
    _open_closed_streams()
    try:
        from .app import app

        # A terminal without Unicode shows '?'; what is read and is none is refused as a prompt.
        # Files and pipes are UTF-8, where Windows would lose letters.
        kinds = (sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")
        for stream, errors in kinds:
            if hasattr(stream, "reconfigure"):
                piped = sys.platform == "win32" and not stream.isatty()
                stream.reconfigure(encoding="utf-8" if piped else None, errors=errors)
        app(prog_name="dllm")
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code
    gc.freeze()  # the interpreter would search all of it once more as it ends: half a second
    sys.exit(_flush(code))


def _open_closed_streams() -> None:
    """A shell can start a program without stdin, stdout or stderr (``<&-``): nothing is read then,
    and what is written is lost."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


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
