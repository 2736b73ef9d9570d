"""Compile the kernels, find them, load them."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError

FOLDER_VARIABLE = "DLLM_KERNELS"  # where compiled kernels lie; empty: they are not used
# For each kind of processor what to compile for, and what it has to have by Linux's names.
TARGETS = {
    "x86_64": ("native", ("avx2", "fma")),
    "aarch64": ("armv8.2-a+dotprod", ("asimd", "asimddp")),  # no more than was tested
}
WIDER = {"avx512f", "avx512bw", "avx512dq", "avx512_vnni"}
MARCH, NEEDED = TARGETS.get(platform.machine(), ("", ("x86-64 or AArch64",)))
FLAGS = (
    "-std=c++17", "-O3", f"-march={MARCH}", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC",
)  # fmt: skip
SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
CPUINFO = Path("/proc/cpuinfo")
_A, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int  # an address, a size, a small number
SIGNATURES = {
    "dllm_block": (),
    "dllm_attention": (*[_A] * 6, *[_N] * 5, ctypes.c_double, _I, _I, _I),
    "dllm_lay_out": (_A, _A, _N, _N, _I),
    "dllm_product": (_A, _A, _I, _A, _A, _N, _N, _N, _I, _I),
    "dllm_product8": (*[_A] * 7, _N, _N, _N, _I, _I),
    "dllm_product4": (_A, _A, _A, _A, _A, _A, _A, _N, _N, _N, _N, _I, _I),
    "dllm_layers": (_A, _N, *[_A] * 8, _N, _A, _N, _A, *[_N] * 3, ctypes.c_double, _I, _I, _I),
    "dllm_grouped": (_A, _N, _A, _N, _A, _A, _N, _I, _I),
    "dllm_bend": (_A, _N, _N, _N, ctypes.c_float, ctypes.c_float, _I),
    "dllm_reduce": (_A, _A, _A, _A, _A, _A, _N, _N, _N, _I, _I, _I),
    "dllm_rms_norm": (_A, _A, _A, _N, _N, ctypes.c_double, _I, _I),
    "dllm_rotate_scatter": (*[_A] * 10, *[_N] * 5, _I, _I),
    "dllm_silu_times": (_A, _A, _A, _N, _I, _I),
    "dllm_uniform": (_A, _A, _N, _N, _N, _A, _I),
    "dllm_round": (_A, _A, _A, _A, _N, _N, _N, _I, _I, _I),
}
ANSWERS = {  # what returns a number: 0, 1 or 3 where it refuses, 2 where there is no memory
    "dllm_block", "dllm_attention", "dllm_product", "dllm_product8", "dllm_rotate_scatter",
    "dllm_layers", "dllm_grouped",
}  # fmt: skip


@cache
def features() -> frozenset[str]:
    """What the processor says it can do; nothing where that is not Linux."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    kinds = ("flags", "Features")  # of x86, of AArch64
    named = next((line.partition(":")[2] for line in lines if line.startswith(kinds)), "")
    return frozenset(named.split())


def missing_features() -> list[str]:
    """What this processor lacks for the kernels; ["no AMX"]: with that, oneDNN is faster."""
    lacking = [name for name in NEEDED if name not in features()]
    return lacking or (["no AMX"] if "amx_bf16" in features() else [])


def vectors() -> str:
    """The vector unit that the kernels are made for; empty where they cannot be."""
    if any(name not in features() for name in NEEDED):
        return ""
    return "NEON" if "asimd" in NEEDED else "AVX-512" if features() >= WIDER else "AVX2"


def built() -> Path | None:
    """The file with the kernels of this version for this processor, wherever there is one."""
    file = _file()
    return file if file is not None and os.path.exists(file) else None  # a folder may be locked


def _file() -> Path | None:
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    named = os.environ.get(FOLDER_VARIABLE, f"{caches}/dllm/kernels")
    folder = Path(os.path.expanduser(named))
    if not named or folder.parts[0] == "~":  # a user may have no home
        return None
    said = [file.read_bytes() for file in (*SOURCES, *HEADERS)]
    said += [name.encode() for name in (*FLAGS, *sorted(features()))]
    key = hashlib.sha256(b"\0".join(said))
    return folder / f"kernels-{key.hexdigest()[:16]}.so"


def build() -> Path:
    """Compile the kernels for this processor, unless that is done, and return the file.

    Raises `ConfigError` where the processor lacks something, there is no compiler, or it fails.
    """
    lacking = missing_features()
    if lacking:
        raise ConfigError(
            f"the compiled kernels need a processor on Linux with {', '.join(lacking)}, which this "
            "one is not; dllm runs without them"
        )
    file = _file()
    if file is None:
        raise ConfigError(f"compiled kernels have no folder: name one in {FOLDER_VARIABLE}")
    library.cache_clear()
    if library() is not None:
        return file
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise ConfigError(
            "no C++ compiler was found: install g++ (Debian, Ubuntu: apt install g++) or name one "
            "in the environment variable CXX"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"{compiler} could not compile the kernels: {done.stderr[-2000:]}")
        made.replace(file)  # at once: another process may look for it
    library.cache_clear()
    if library() is None:
        raise ConfigError(f"{file} cannot be loaded: name another folder in {FOLDER_VARIABLE}")
    return file


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there are none."""
    file = None if missing_features() else built()
    if file is None:
        return None
    try:
        loaded = ctypes.CDLL(str(file))
    except OSError:
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, _I if name in ANSWERS else None
        if name in ANSWERS - {"dllm_block"}:
            function.errcheck = _answer
    return loaded


def _answer(result: int, function: Any, _: Any) -> int:
    if result == 2:
        raise MemoryError(f"no memory is left for {function.__name__}")
    return result


def loaded() -> ctypes.CDLL:
    """`library` where something has been laid out for it."""
    result = library()
    assert result is not None
    return result
