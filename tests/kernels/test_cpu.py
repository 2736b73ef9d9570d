"""Compiled kernels: exact where they promise it, the same with any number of threads, and errors
that say what is missing.  Products of plain weights are in `test_linear.py`."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm.core.errors import ConfigError
from dllm.kernels import cpu, linear, quantised
from dllm.kernels.cpu import compiled as of
from dllm.kernels.cpu import layers
from dllm.kernels.cpu.products import Rounded, Weight, Weight4, Weight8
from dllm.kernels.statistics import Shaped, reduce
from dllm.kernels.statistics.result import Options

from .filtered import token_statistics

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(outputs: int, inputs: int, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(outputs + inputs)
    return torch.randint(low, high, (outputs, inputs)).to(dtype)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 32), (130, 96), (1000, 4128)])
def test_products_of_8_bits_are_sums_of_whole_numbers(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """The bits of oneDNN, where that sums them exactly."""
    weight, scale = numbers(*shape, -127, 128, torch.int8), torch.rand(shape[0], 1)
    own, x = Weight8(weight, scale), torch.randn(37, shape[1]).to(dtype)
    x[0], x[1], x[2] = 0, 3, -3  # all 0, all 127, all -127
    rows = own.rounded(x)
    whole = (rows.numbers.double() - 128) @ weight.double().T  # below 2^53
    expected = (whole.float() * scale.T * rows.scale).to(dtype)
    assert torch.equal(own.multiply_rounded(rows, dtype), expected)
    assert torch.equal(own.unpacked(), weight)
    if quantised.whole_products():
        other = quantised.Int8(weight, scale)
        theirs = other.rounded(x)
        assert torch.equal(rows.numbers, theirs.numbers) and torch.equal(rows.scale, theirs.scale)
        assert torch.equal(other.multiply_rounded(theirs, dtype), expected)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("shape", [(32, 128), (200, 384)])
def test_products_of_4_bits(shape: tuple[int, int], group: int, dtype: torch.dtype) -> None:
    """Those of the rounded rows with the restored weight, in float64."""
    outputs, inputs = shape
    weight = numbers(outputs, inputs // 2, 0, 256, torch.uint8)
    scale, zero = (torch.rand(outputs, inputs // group).bfloat16() - 0.3 for _ in range(2))
    own, x = Weight4(weight, scale, zero), torch.randn(11, inputs).to(dtype)
    rows = own.rounded(x)
    eights = rows.numbers.view(torch.int8).view(11, -1, 2, 4)  # of 8 inputs the even ones first
    signed = eights.transpose(2, 3).double().reshape(11, -1, group)
    assert ((signed * rows.scale[..., None]).flatten(1) - x).abs().max() < x.abs().max() / 250
    assert rows.sums is not None
    torch.testing.assert_close(rows.sums.double(), signed.sum(2) * rows.scale, rtol=1e-6, atol=1e-6)
    w = (quantised.whole(weight).double() - 8).view(outputs, -1, group) * scale.double()[..., None]
    w += zero.double()[..., None]
    exact = torch.einsum("mgk,mg,ngk->mn", signed, rows.scale.double(), w)
    result = own.multiply_rounded(rows, dtype)
    assert result.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance * 10)
    assert torch.equal(own.unpacked(), weight)


@pytest.mark.usefixtures("compiled", "two_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    x, weight = torch.randn(300, 2080).to(dtype), torch.randn(700, 2080).to(dtype)
    eight = Weight8(numbers(700, 2080, -127, 128, torch.int8), torch.rand(700, 1))
    scale = torch.rand(700, 65)
    four = Weight4(numbers(700, 1040, 0, 256, torch.uint8), scale, scale)
    done = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        done.append([
            Weight(weight).multiply(x, None),
            Weight(weight, copy=False).multiply(x, None),
            *(w.multiply_rounded(w.rounded(x), dtype) for w in (eight, four)),
        ])  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*done, strict=True))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 16, 17, 1000])
def test_a_row_of_logits_is_reduced_as_before(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(size)
    x = torch.randn(12, size + 3).mul_(4).round_().to(dtype)[:, 1 : size + 1]  # with ties, strided
    x[1], x[2] = -torch.inf, 7.0
    x[3, size // 2], x[4, size // 2], x[5] = torch.inf, -torch.inf, -200.0
    x[5, -1], x[6, size // 3] = 100.0, torch.nan
    options = Options(needs=frozenset({"margin", "entropy"}))
    found = reduce.compiled(x, options)
    with monkeypatch.context() as patch:
        patch.setattr(reduce, "library", lambda: None)
        plain = reduce.reduce(x.float().clone(), 0, options)
    assert found is not None and plain.second is not None and found.second is not None
    fine = [row for row in range(12) if row not in (3, 6)]  # infinity, NaN: an error elsewhere
    assert torch.equal(found.index, plain.index)
    assert found.best[6].isnan() and found.rest[6].isnan()
    for name in ("best", "second"):
        assert torch.equal(getattr(found, name)[fine], getattr(plain, name)[fine]), name
    for name in ("rest", "moment"):
        own, other = getattr(found, name)[fine], getattr(plain, name)[fine]
        torch.testing.assert_close(own, other, rtol=3e-6, atol=1e-30, msg=name)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_logits_are_bent_as_by_pytorch(size: int) -> None:
    x = torch.cat([torch.linspace(-90, 90, size), torch.tensor([torch.inf, -torch.inf, torch.nan])])
    rows = torch.stack([x, -x], 0)
    found = Shaped(torch.empty(0), 30.0, 2.0).shape(torch.cat([rows, rows], 1)[:, : len(x)])
    torch.testing.assert_close(found, (rows / 30).tanh() * 60, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.usefixtures("compiled")
def test_what_else_is_asked_changes_no_bit() -> None:
    head = torch.nn.Linear(64, 500).requires_grad_(False)
    linear.pack(head)
    hidden = torch.randn(9, 64)
    with torch.inference_mode():
        plain = token_statistics(hidden, head, needs=())
        for more in ({"top": 3}, {"select": torch.arange(9)}, {"needs": ("entropy", "margin")}):
            other = token_statistics(hidden, head, **({"needs": ()} | more))  # type: ignore[arg-type]
            assert torch.equal(other.logprob, plain.logprob), more
        for row in range(9):
            alone = token_statistics(hidden[row : row + 1], head, needs=(), top=2)
            assert torch.equal(alone.logprob, plain.logprob[row : row + 1])


@pytest.mark.parametrize(
    ("features", "compiler", "message"),
    [
        (("sse2",), "c++", f"need a processor on Linux with {', '.join(of.NEEDED)}"),
        ((*of.NEEDED, "amx_bf16"), "c++", "no AMX"),
        (of.NEEDED, None, "no C\\+\\+ compiler was found"),
        (of.NEEDED, "false", "false could not compile"),
    ],
)
def test_what_is_missing_is_said(
    features: tuple[str, ...], compiler: str | None, message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(of, "features", lambda: frozenset(features))
    monkeypatch.setattr(of.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    if compiler is not None:
        monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv(of.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        cpu.build()
    assert cpu.built() is None


@pytest.mark.parametrize(
    ("machine", "line", "lacking", "unit"),
    [
        ("x86_64", "flags\t\t: fpu avx2 fma", [], "AVX2"),
        ("x86_64", "flags : avx2 fma avx512f avx512bw avx512dq avx512vl", [], "AVX2"),
        ("x86_64", "flags : avx2 fma avx512f avx512bw avx512dq avx512_vnni", [], "AVX-512"),
        ("x86_64", "flags\t\t: fpu sse2", ["avx2", "fma"], ""),
        ("aarch64", "Features\t: fp asimd crc32 asimddp ssbs", [], "NEON"),
        ("aarch64", "Features\t: fp asimd crc32", ["asimddp"], ""),
        ("aarch64", None, ["asimd", "asimddp"], ""),  # another system
    ],
)
def test_the_processor_is_asked(
    machine: str, line: str | None, lacking: list[str], unit: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if line is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nbugs\t: none\n")
    monkeypatch.setattr(of, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(of, "features", of.features.__wrapped__)
    monkeypatch.setattr(of, "NEEDED", of.TARGETS[machine][1])
    assert (cpu.missing_features(), cpu.vectors()) == (lacking, unit)


@pytest.mark.usefixtures("compiled")
@pytest.mark.skipif("CXX" in os.environ, reason="another compiler may leave a vector unit out")
def test_what_is_said_of_the_vector_unit_is_what_was_compiled() -> None:
    """Outputs of a block: four vectors of 32 registers, two of 16."""
    blocks = {"AVX-512": 4 * 16, "AVX2": 2 * 8, "NEON": 4 * 4}
    assert of.loaded().dllm_block() == blocks[cpu.vectors()]


@pytest.mark.slow  # a compiler runs
def test_products_with_neon_in_an_emulator(tmp_path: Path) -> None:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("no cross compiler, or no emulator")
    march = f"-march={of.TARGETS['aarch64'][0]}"
    flags = [march, *(flag for flag in of.FLAGS if "march" not in flag and flag != "-shared")]
    own = [Path(of.__file__).with_name(f"{name}.cpp") for name in ("products", "noise")]
    files = [*own, Path(__file__).with_name("neon.cpp")]
    program = tmp_path / "neon"
    subprocess.run([compiler, *flags, "-O1", "-static", *files, "-o", program], check=True)
    done = subprocess.run([emulator, program], capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"


@pytest.mark.usefixtures("compiled")
def test_a_file_that_is_no_library_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(of.FOLDER_VARIABLE, str(tmp_path))
    cpu.library.cache_clear()
    assert cpu.built() is None and cpu.library() is None
    file = of._file()
    assert file is not None
    file.write_bytes(b"torn")
    cpu.library.cache_clear()
    assert cpu.built() == file and cpu.library() is None


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("where", "why"),
    [
        ({}, "have no folder: name one"),
        ({of.FOLDER_VARIABLE: ""}, "have no folder: name one"),
        ({of.FOLDER_VARIABLE: "/locked"}, "Permission denied"),
        ({"XDG_CACHE_HOME": "/locked"}, "Permission denied"),
    ],
)
def test_folders_that_cannot_be_had(
    where: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users without a home, and homes of others, once failed in every command."""

    def locked(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    for name in (of.FOLDER_VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.setattr(Path, "exists", locked)
    monkeypatch.setattr(Path, "mkdir", locked)
    monkeypatch.setattr(of, "missing_features", list)
    monkeypatch.setenv("CXX", "c++")
    cpu.library.cache_clear()
    assert cpu.built() is None and cpu.library() is None
    with pytest.raises((ConfigError, PermissionError), match=why):
        cpu.build()


@pytest.mark.usefixtures("uncompiled")
def test_kernels_that_cannot_be_loaded_are_not_called_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder from which the system runs nothing."""
    monkeypatch.setenv(of.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(of, "missing_features", list)
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor last; do :; done; echo torn > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot be loaded"):
            cpu.build()


@pytest.mark.usefixtures("compiled", "two_threads")
def test_memory_that_is_missing_is_said() -> None:
    """Before threads start, where what they throw would end the process."""
    torch.set_num_threads(2)
    huge = 2**50
    q = torch.zeros(1, 1, 1, 2)
    one = torch.zeros(16).data_ptr()
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            own = q.to(dtype)
            keys = own.expand(1, 1, huge, 2)
            with pytest.raises(MemoryError, match="dllm_attention"):
                layers.attention(own, keys, keys, None, 1.0)
    with pytest.raises(MemoryError, match="dllm_product"):
        of.loaded().dllm_product(one, one, False, None, one, 240, 16, huge, True, 2)
    assert torch.equal(layers.silu_times(q, q), q)  # the process goes on


@pytest.mark.usefixtures("compiled")
def test_8_bits_at_the_limit_of_their_sums() -> None:
    inputs = quantised.MOST_INPUTS // 4 * 4
    weight = Weight8(torch.full((3, inputs), -128, dtype=torch.int8), torch.ones(3, 1))
    rows = Rounded(torch.full((1, inputs), 255, dtype=torch.uint8), torch.ones(1, 1))
    result = weight.multiply_rounded(rows, torch.float32)
    assert torch.equal(result, torch.full((1, 3), -128.0 * 127 * inputs))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_whole_numbers_and_rows_of_other_dtypes(dtype: torch.dtype) -> None:
    """Their products are those of float32, and no byte beyond them is written."""
    scale = torch.rand(48, 4) / 50
    eight = Weight8(numbers(48, 128, -127, 128, torch.int8), scale[:, :1])
    four = Weight4(numbers(48, 64, 0, 256, torch.uint8), scale, scale)
    x = torch.randn(9, 128).to(dtype)
    for weight in (eight, four):
        expected = weight.multiply_rounded(weight.rounded(x.float()), torch.float32)
        result = weight.multiply_rounded(weight.rounded(x), dtype)
        assert torch.equal(result, expected.to(dtype))
