"""The command line in the test process, as in its own tests."""

from __future__ import annotations

from tests.cli.conftest import cli

__all__ = ["cli"]
