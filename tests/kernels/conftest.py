"""With the kernels of PyTorch and with those that are compiled for the processor."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dllm.core.errors import ConfigError
from dllm.kernels import cpu
from dllm.kernels.cpu.compiled import FOLDER_VARIABLE


@pytest.fixture(scope="session")
def compiled_folder(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """Where the compiled kernels lie: made once for all workers and runs, as the file's name tells
    its sources and the folder's its compiler; skips where they cannot be made."""
    cache = getattr(pytestconfig, "cache", None)
    compiler = "".join(filter(str.isalnum, os.environ.get("CXX", "")))
    folder = cache.mkdir(f"kernels{compiler}") if cache else tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch, (folder / "lock").open("w") as lock:
        patch.setenv(FOLDER_VARIABLE, str(folder))
        if not cpu.missing_features():
            import fcntl  # Linux has it

            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            cpu.build()
        except ConfigError as error:
            pytest.skip(str(error))
    cpu.library.cache_clear()
    return folder


@pytest.fixture
def compiled(compiled_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What is made in the test uses the compiled kernels."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(compiled_folder))
    cpu.library.cache_clear()
    assert cpu.library() is not None
    yield compiled_folder
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    cpu.library.cache_clear()


@pytest.fixture(params=["plain", "compiled"])
def kernels(request: pytest.FixtureRequest) -> str:
    """The test runs with both."""
    name: str = request.param
    request.getfixturevalue("compiled" if name == "compiled" else "uncompiled")
    return name
