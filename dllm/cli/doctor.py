"""``dllm doctor``: what is installed, what the machine has, what a model needs of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..core import errors
from ..core.errors import INSTALL_EXTRA, ConfigError, DllmError
from .output import distribution_version, versions, waiting

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ..models.checkpoint import Checkpoint
    from ..models.family import Family
    from ..models.footprint import Footprint

GOOD, BAD, PLAIN = "ok", "problem", ""
SIGNS = {GOOD: ("✓", "green"), BAD: ("✗", "red"), PLAIN: ("·", "dim")}
DEVELOPMENT = ("test", "dev", "docs", "browser", "clients")  # users need not hear about them


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    text: str
    state: str = PLAIN


def doctor(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Hub id, folder, GGUF file or bundled name to check."),
    ] = None,
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Compare what can be compared on this machine.")
    ] = False,
    compile_kernels: Annotated[
        bool, typer.Option("--compile", help="Compile faster kernels for this processor, once.")
    ] = False,
) -> None:
    """Report versions, devices and extras, and whether a model fits.

    Nothing is fetched but a model's small files; weights that are here are read once, for NaN and
    infinity.  Exits with 1 when the model cannot be used here.
    """
    if selftest:
        if model is not None or compile_kernels:
            raise ConfigError("--selftest reads no --model and compiles nothing: give it alone")
        raise typer.Exit(_selftest())
    console = Console(highlight=False, soft_wrap=True)
    if compile_kernels:
        from ..kernels import cpu

        with waiting("compiling"):
            cpu.build()
    with waiting("looking around"):
        memory = device_memory()
        result = [*environment(), *devices(), *extras(), *bundled()]
    _report(console, result)
    if model is None:
        return
    with waiting(f"reading {model}"):
        verdict = list(examine(model, memory))
    _report(console, verdict)
    if any(finding.state == BAD for finding in verdict):
        raise typer.Exit(1)


def _selftest() -> int:
    """Print the checks as they are made, then the block to paste; 1 when something differs."""
    from ..eval.selftest import report, run

    done = []
    for check in run():
        done.append(check)
        print(check, file=sys.stderr, flush=True)
    print(report(done))
    return int(any(check.same is False for check in done))


def environment() -> Iterator[Finding]:
    """Versions of what the library stands on."""
    for name, version in versions().items():
        yield Finding(name, version or "missing", PLAIN if version else BAD)


def devices() -> Iterator[Finding]:
    """Processors and their memory."""
    import torch

    free, total = main_memory()
    yield Finding("cpu", f"{torch.get_num_threads()} threads, {size(free)} of {size(total)} free")
    yield cpu_kernels()
    yield batches()
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding(f"cuda:{index}", f"{name}, {size(free)} of {size(total)} free")
    if not torch.cuda.is_available():
        yield Finding("cuda", "none")


def cpu_kernels() -> Finding:
    """Whether there are compiled kernels (`dllm.kernels.cpu`), or what it takes to have them."""
    from ..kernels import cpu

    if cpu.library() is not None:
        return Finding("cpu kernels", f"compiled for {cpu.vectors()}: {cpu.built()}", GOOD)
    lacking = cpu.missing_features()
    if lacking:
        return Finding("cpu kernels", f"PyTorch's; those of dllm need Linux, {', '.join(lacking)}")
    return Finding("cpu kernels", "PyTorch's; `dllm doctor --compile` makes faster ones (g++)")


def batches() -> Finding:
    """The dtypes in which a row here has the same bits in any batch: see docs/hardware.md."""
    from ..kernels import linear

    exact = len(linear.dtypes()) if linear.available() else 0
    promised = ("not promised on this processor", "float32 only", "float32, bfloat16, int8, int4")
    return Finding("cpu batches", f"bitwise identical: {promised[exact]}")


def device_memory() -> tuple[str, int]:
    """The device `--device auto` takes, and its free memory in bytes."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
    return "the main memory", main_memory()[0]


def main_memory() -> tuple[int, int]:
    """Free and total bytes of the machine."""
    import psutil  # type: ignore[import-untyped, unused-ignore]

    memory = psutil.virtual_memory()
    return memory.available, memory.total


def extras() -> Iterator[Finding]:
    """Optional dependencies, as this distribution declares them."""
    wanted = errors.extras()
    if not wanted:
        yield Finding("extras", "unknown, because this copy of dllm is not installed")
    for extra, names in wanted.items():
        if extra in DEVELOPMENT:
            continue
        present = {name: distribution_version(name) for name in names}
        missing = [name for name, version in present.items() if version is None]
        listing = ", ".join(f"{name} {version or 'missing'}" for name, version in present.items())
        hint = ": " + INSTALL_EXTRA.format(extra=extra) if missing else ""
        if missing and extra == "flash":
            hint += " (needs a CUDA GPU; sdpa is used without it)"
        yield Finding(f"extra {extra}", listing + hint, PLAIN if missing else GOOD)


def bundled() -> Iterator[Finding]:
    """Whether the models of the wheel are there."""
    from ..models.checkpoint import BUNDLED, find

    for name in BUNDLED:
        try:
            find(name)
        except DllmError:
            yield Finding(name, "not part of this installation")
        else:
            yield Finding(name, "bundled", GOOD)


def examine(model: str, memory: tuple[str, int]) -> Iterator[Finding]:
    """What the files of ``model`` say.  Raises `CheckpointError` when there are none."""
    from ..models.checkpoint import open_checkpoint
    from ..models.footprint import footprint, gguf_footprint
    from ..models.gguf import SUFFIX
    from ..models.reading import family_of, native_config

    if model.endswith(SUFFIX):
        needs, name = gguf_footprint(Path(model).expanduser())
        yield Finding("family", name, GOOD)
        yield from _sizes(needs, memory, gguf=True)
        return
    checkpoint = open_checkpoint(model)
    yield Finding("model", checkpoint.name)
    if "auto_map" in checkpoint.config:
        yield Finding("remote code", "named by config.json (auto_map); not needed and never run")
    try:
        needs = footprint(checkpoint)
    except DllmError as error:
        yield Finding("architecture", str(error), BAD)
        return
    family = family_of(checkpoint)
    config, official = native_config(checkpoint, family)
    yield Finding("family", family.name, GOOD)
    if checkpoint.config.get("quantization_config"):
        yield Finding("quantised", "the weights are stored smaller than is told here")
    yield from _sizes(needs, memory)
    yield from _tokens(checkpoint, family, config)
    yield from _weights(checkpoint, family, config, official)


def _sizes(needs: Footprint, memory: tuple[str, int], gguf: bool = False) -> Iterator[Finding]:
    """What a model takes; of a GGUF file, which is rounded already, no ways to take less."""
    yield Finding("parameters", count(needs.parameters))
    copies = f", and {size(needs.copies)} of copies to multiply with" if needs.copies else ""
    held = "rounded as in the file" if gguf else f"in {needs.dtype}"
    yield Finding("weights", f"{size(needs.weights)} {held}{copies}")
    yield Finding(
        "key/value cache", f"{size(needs.keys_values)} per row at its context of {needs.context}"
    )
    yield from islice(fit(needs, *memory), 1 if gguf else None)
    yield from _steps(needs)


def _steps(needs: Footprint) -> Iterator[Finding]:
    """What bounds a step on this machine, by arithmetic from its speed, measured in a second."""
    import torch

    from ..eval.bounds import BLOCK, KEYS, measure, step_of

    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = measure(where, getattr(torch, needs.dtype))
    yield Finding(
        "this machine", f"{device.bandwidth / 1e9:.0f} GB/s, {device.speed / 1e9:,.0f} GFLOP/s in "
        f"{needs.dtype}; a row of a step computes {BLOCK} positions and reads {KEYS} keys",
    )  # fmt: skip
    for rows in (1, 8, 32):
        taken = step_of(needs, rows).seconds(device)
        most = max(taken, key=lambda name: taken[name])
        told = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in taken.items())
        yield Finding(f"step, rows: {rows}", f"bound by {most}; ms: {told}")


def _tokens(checkpoint: Checkpoint, family: Family, config: PreTrainedConfig) -> Iterator[Finding]:
    """Its tokenizer, and whether its special ids make sense."""
    from ..models.facts import read_facts
    from ..models.probe import probe
    from ..models.tokenizer import load_tokenizer, loader_of

    try:
        if not checkpoint.bundled:
            probe(checkpoint.folder, loader_of(family, checkpoint.folder))
        tokenizer = load_tokenizer(checkpoint.folder, family)
        facts = read_facts(
            family, config, tokenizer, raw=checkpoint.config, generation=checkpoint.generation,
            given={}, published=family.published(checkpoint.name),
        )  # fmt: skip
    except DllmError as error:
        yield Finding("tokens", str(error), BAD)
        return
    if tokenizer is None:
        yield Finding(
            "tokenizer",
            "none: text needs one (--tokenizer, or dllm.load(..., tokenizer=...)), else prompts "
            "are token ids",
        )
    else:
        yield Finding("tokenizer", f"{len(tokenizer):,} tokens", GOOD)
    if facts.mask_token_id is not None:
        name = "none: the noise is uniform" if facts.uniform else str(facts.mask_token_id)
        yield Finding("mask token", f"{name}, ends {facts.stop_token_ids}")


def _weights(
    checkpoint: Checkpoint, family: Family, config: PreTrainedConfig, official: bool
) -> Iterator[Finding]:
    """Whether the files hold the network of config.json, and numbers only."""
    from ..models.headers import check_headers, not_finite

    if not any(checkpoint.folder.glob("*.safetensors")):
        yield Finding("files", "no weights here yet: they are not checked")
        return
    try:
        check_headers(checkpoint.folder, family, config, official)
        broken = list(not_finite(checkpoint.folder))
    except DllmError as error:
        yield Finding("files", str(error), BAD)
        return
    if broken:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        yield Finding(
            "files", f"NaN or infinite numbers in {', '.join(broken[:3])}{more}: the model would "
            "answer nonsense; download them again, or train with a smaller step", BAD,
        )  # fmt: skip
    else:
        yield Finding("files", "complete, every number finite", GOOD)


def fit(needs: Footprint, device: str, free: int) -> Iterator[Finding]:
    """Whether it fits, and the ways out if not."""
    verdict = f"about {size(needs.needed)} for one row, {size(free)} free in {device}"
    if needs.needed <= free:
        yield Finding("fits", verdict, GOOD)
        return
    yield Finding("does not fit", verdict, BAD)
    if needs.dtype == "float32":
        yield Finding("instead", f"--dtype bfloat16: {size(needs.weights_in(16))} of weights")
    for bits in (8, 4):
        way = f"--quantization int{bits}"
        if device != "the main memory":
            way = f"quantization_config=BitsAndBytesConfig(load_in_{bits}bit=True)"
        held = needs.weights_in(bits)
        rest = "; experts are not rounded" if held > 0.9 * needs.weights else ""
        yield Finding("instead", f"{way}: about {size(held)} of weights{rest}")
    yield Finding(
        "instead", 'dllm.load(..., device_map="auto"): spread over all GPUs and main memory'
    )


def size(amount: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= scale:
            return f"{amount / scale:.1f} {unit}"
    return f"{amount} bytes"


def count(number: int) -> str:
    """A number of parameters for people."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.2f}{unit}"
    return str(number)


def _report(console: Console, findings: list[Finding]) -> None:
    for finding in findings:
        sign, style = SIGNS[finding.state]
        console.print(Text.assemble((sign, style), f" {finding.topic:<17}", finding.text))
