"""The command line in the test process, as in its own tests."""

from tests.cli.conftest import cli

__all__ = ["cli"]
