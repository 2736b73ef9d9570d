"""What dtype="auto" stands for."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm.kernels.cpu import compiled
from dllm.models import load, precision
from dllm.models.checkpoint import open_checkpoint
from dllm.models.footprint import footprint
from dllm.models.precision import SMALL, auto_dtype, native_bfloat16

FLAGS = "processor : 0\nflags\t\t: fpu sse2 avx512f {}\nbugs : none\n"


@pytest.mark.parametrize(
    ("flags", "native"),
    [("amx_bf16 amx_tile", True), ("avx512_bf16", True), ("avx512_fp16", False), ("", False),
     (None, False)],
)  # fmt: skip
def test_the_processor_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str | None, native: bool
) -> None:
    """Where the system does not say, nothing is assumed."""
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(FLAGS.format(flags))
    monkeypatch.setattr(compiled, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(precision, "features", compiled.features.__wrapped__)
    assert native_bfloat16() is native


@pytest.mark.parametrize(
    ("native", "stored", "parameters", "chosen", "said"),
    [
        (True, "float32", SMALL, torch.bfloat16, "computed in bfloat16"),
        (True, "float16", SMALL, torch.bfloat16, "computed in bfloat16"),
        (True, "bfloat16", SMALL, torch.bfloat16, None),
        (True, "float32", SMALL - 1, "float32", None),
        (True, "float8_e4m3fn", SMALL, "float8_e4m3fn", None),
        (False, "bfloat16", SMALL, torch.float32, "no native bfloat16"),
        (False, "bfloat16", 2**40, "bfloat16", None),  # would not fit
        (False, "float32", SMALL, "float32", None),
    ],
)
def test_what_auto_stands_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, native: bool,
    stored: str, parameters: int, chosen: Any, said: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(precision, "native_bfloat16", lambda: native)
    monkeypatch.setattr(precision, "free_memory", lambda: 10**9)
    with caplog.at_level(logging.WARNING, "dllm"):
        assert auto_dtype("x", stored, parameters) == chosen
    assert (said is None) == (not caplog.messages)
    assert said is None or said in caplog.messages[0]


def test_loading_follows_it(
    monkeypatch: pytest.MonkeyPatch, copy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Large enough by decree; a dtype that is asked for is kept, and bundled models are float32."""
    monkeypatch.setattr(precision, "native_bfloat16", lambda: True)
    monkeypatch.setattr(precision, "SMALL", 1000)
    folder = copy("llada-tiny")
    stored = json.loads((folder / "config.json").read_text()).get("torch_dtype")
    assert stored in (None, "float32")
    assert load(folder).dtype == torch.bfloat16
    assert load(folder, dtype="float32").dtype == torch.float32
    assert load("nano").dtype == torch.float32
    assert capsys.readouterr().out == ""


def test_files_say_their_dtype_where_the_config_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, copy: Any
) -> None:
    """`dllm doctor` reckons with the one that is loaded; 8-bit floats are widened."""
    folder = copy("llada-tiny", drop=("torch_dtype", "dtype"))
    weights = load_file(folder / "model.safetensors")
    for stored in (torch.float8_e4m3fn, torch.bfloat16):
        save_file({key: x.to(stored) for key, x in weights.items()}, folder / "model.safetensors")
        assert load(folder).dtype == torch.bfloat16
        assert footprint(open_checkpoint(folder)).dtype == "bfloat16"
    monkeypatch.setattr(precision, "SMALL", 1000)
    monkeypatch.setattr(precision, "native_bfloat16", lambda: False)
    with caplog.at_level(logging.WARNING, "dllm"):
        assert load(folder).dtype == torch.float32
    assert "stored in bfloat16" in caplog.messages[0]
