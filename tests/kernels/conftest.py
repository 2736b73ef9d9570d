"""With the kernels of PyTorch and with those that are compiled for the processor."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dllm.core.errors import ConfigError
from dllm.kernels import cpu
from dllm.kernels.cpu.compiled import FOLDER_VARIABLE


@pytest.fixture(scope="session")
def compiled_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Where the compiled kernels lie, made once; skips where they cannot be made."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder))
        try:
            cpu.build()
        except ConfigError as error:
            pytest.skip(str(error))
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
    if request.param == "compiled":
        request.getfixturevalue("compiled")
    name: str = request.param
    return name
