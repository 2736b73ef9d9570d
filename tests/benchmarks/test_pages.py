"""What README, documentation and model card say was measured is what the committed files hold."""

import pytest

from .script import run_script


@pytest.mark.slow  # every sampler decodes its example
def test_the_tables_are_those_of_the_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    run_script("pages.py", "--check", monkeypatch=monkeypatch)
