"""``dllm doctor --selftest``: what can be compared on the machine at hand, in two minutes.

Every check runs the same thing two ways, on networks with random weights and on the bundled model:
kernels against their plain twins, attention kernels against SDPA, padded (on a GPU: captured) steps
against plain ones, rows in a batch against rows alone.  A difference names the switch that avoids
it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from ..api import generate
from ..core.errors import DllmError, one_line
from ..engine.graphs import uncaptured
from ..kernels import linear, noise
from ..kernels.rotation import rotate_scatter
from ..kernels.statistics import Filters, token_statistics
from ..models import DiffusionModel, load
from ..session import Session
from .machine import machine

PROMPTS = (
    "What is 23 + 12?", "Reverse this list: Tom, Anna, Ben", "Sort this list: Zoe, Ben, Mia",
    "Copy this list: Tom, Anna", "What is 4 + 5?", "Compute 1 + 1.",
)  # fmt: skip
CACHES = ("none", "dual", "dkv")
CHOSEN: dict[str, Any] = {"sampler": "threshold(tau=0.8)", "max_new_tokens": 32, "block_length": 32}
SWITCH = {"torch": "", "triton": "pip uninstall triton (plain kernels take over)"}
WORDS = {True: "ok", False: "DIFFERS", None: "skipped"}


@dataclass(frozen=True)
class Check:
    """One comparison; ``same`` None: it cannot be made here; ``switch`` avoids what differs."""

    name: str
    same: bool | None
    text: str
    switch: str = ""

    def __str__(self) -> str:
        advice = f"; avoid it with {self.switch}" if self.same is False and self.switch else ""
        return f"{WORDS[self.same]:<8} {self.name}: {self.text}{advice}"


def run(device: str | None = None) -> Iterator[Check]:
    """All checks, on the GPU where there is one.  A check that raises counts as a difference."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    checks: tuple[Callable[[str], Iterator[Check]], ...] = (
        statistics, products, rotation, random_numbers, attention, padded_steps, batches,
    )  # fmt: skip
    for check in checks:
        try:
            yield from check(device)
        except (DllmError, RuntimeError, AssertionError, TypeError, ValueError) as error:
            text = f"{type(error).__name__}: {one_line(error)}"
            yield Check(check.__name__.replace("_", " "), False, text)


def report(checks: list[Check]) -> str:
    """One block of text to paste into a report: the machine, then a line per check."""
    facts = [f"{name} {value}" for name, value in machine().items() if value is not None]
    return "\n".join(["dllm selftest", ", ".join(facts), *map(str, checks)])


def backends(device: str) -> tuple[str, ...]:
    """The kernels that this device can run."""
    return ("torch", "triton") if device == "cuda" and find_spec("triton") else ("torch",)


def statistics(device: str) -> Iterator[Check]:
    """Token statistics against logits in float64."""
    generator = torch.Generator().manual_seed(0)
    hidden = 2 * torch.randn(48, 256, generator=generator)
    weight = torch.randn(5000, 256, generator=generator) / 16
    keys = noise.pack_keys([(1, 0, row, 2) for row in range(48)], device)
    cases: list[dict[str, Any]] = [{"top": 4}, {"filters": Filters(0.8), "noise_keys": keys}]
    for backend in backends(device):
        for dtype in (torch.float32, torch.bfloat16):
            rows, head = hidden.to(device, dtype), weight.to(device, dtype)
            worst, differing = 0.0, 0
            for case in cases:
                got = token_statistics(rows, head, backend=backend, **case)
                exact = token_statistics(rows.double(), head.double(), backend="naive", **case)
                agree = got.token == exact.token.to(got.token.device)
                apart = (got.logprob.double().cpu() - exact.logprob.double().cpu()).abs()
                worst = max(worst, float((apart * agree.cpu()).max()))
                differing += int((~agree).sum())
            bound, most = (1e-4, 0) if dtype == torch.float32 else (5e-2, 4)
            yield Check(
                f"token statistics, {backend}, {str(dtype)[6:]}",
                worst <= bound and differing <= most,
                f"log-probabilities within {worst:.1e}, {differing} of 96 tokens differ",
                SWITCH[backend],
            )


def products(device: str) -> Iterator[Check]:
    """Linear layers on a CPU against float64, and a row among others against the row alone."""
    if device != "cpu" or not linear.available():
        unit = torch.backends.cpu.get_cpu_capability()
        told = f"PyTorch multiplies ({unit}): a row in a batch may differ from the row alone"
        yield Check("packed weights", None, told if device == "cpu" else "no CPU")
        return
    generator = torch.Generator().manual_seed(0)
    for dtype in linear.dtypes():
        layer = torch.nn.Linear(576, 1536, bias=False, dtype=dtype)
        rows = torch.randn(40, 576, generator=generator).to(dtype)
        linear.pack(layer)
        with torch.inference_mode():
            result = layer(rows)
            alone = torch.cat([layer(row[None]) for row in rows])
        exact = rows.double() @ layer.weight.double().T
        worst = float(((result.double() - exact) / exact.abs().clamp(min=1)).abs().max().detach())
        differing = int((result != alone).any(1).sum())
        yield Check(
            f"packed weights, {str(dtype)[6:]}",
            worst <= (1e-5 if dtype == torch.float32 else 1e-2) and not differing,
            f"within {worst:.1e} of float64, {differing} of 40 rows differ from themselves alone",
            "torch.backends.mkldnn.enabled = False before dllm.load",
        )


def rotation(device: str) -> Iterator[Check]:
    """Rotation and the write to the buffer against the plain twin."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(h, 40, 64, generator=generator) for h in (8, 2, 2))
    angle = torch.rand(40, 32, generator=generator).repeat(1, 2) * 6
    slots = torch.randperm(64, generator=generator)[:40]
    q, k, v, slots = (x.to(device) for x in (q, k, v, slots))
    cos, sin = angle.cos().to(device), angle.sin().to(device)
    for backend in backends(device):
        results = []
        for name in ("naive", backend):
            keys, values = (torch.zeros(2, 64, 64, device=device) for _ in "kv")
            rotated = rotate_scatter(q, k, v, cos, sin, slots, keys, values, backend=name)
            results.append(torch.cat([rotated.flatten(), keys.flatten(), values.flatten()]))
        worst = float((results[0] - results[1]).abs().max())
        yield Check(f"rotation, {backend}", worst <= 1e-5, f"within {worst:.1e}", SWITCH[backend])


def random_numbers(device: str) -> Iterator[Check]:
    """Keyed noise is a function of its key on every device."""
    rows = [(seed, 3, 5, 7) for seed in range(8)]
    here = noise.row_bits(noise.pack_keys(rows, device), 0, 64).cpu()
    same = bool(torch.equal(here, noise.row_bits(noise.pack_keys(rows, "cpu"), 0, 64)))
    yield Check("keyed noise", same, "512 numbers equal those of the CPU" if same else "differ")


def attention(device: str) -> Iterator[Check]:
    """Attention implementations against SDPA: logits of the bundled model."""
    ids = torch.arange(5, 69, device=device)[None]

    def logits(name: str, dtype: str) -> torch.Tensor:
        model = load("nano", device=device, dtype=dtype, attn_implementation=name)
        with torch.inference_mode():
            result: torch.Tensor = model.hf(ids).logits.float()
        return result

    flash = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    for name in ("eager", *flash):
        if name in flash and (device == "cpu" or find_spec(flash[name]) is None):
            why = "no GPU" if device == "cpu" else f"{flash[name]} is not installed"
            yield Check(f"attention, {name}", None, why)
            continue
        dtype = "float32" if name == "eager" else "bfloat16"
        worst = float((logits(name, dtype) - logits("sdpa", dtype)).abs().max())
        bound = 1e-2 if dtype == "float32" else 0.5
        yield Check(
            f"attention, {name}", worst <= bound, f"logits within {worst:.1e} of sdpa in {dtype}",
            "attn_implementation='sdpa'",
        )  # fmt: skip


def padded_steps(device: str) -> Iterator[Check]:
    """``cuda_graphs`` against plain steps, and on a GPU the time of both; off a GPU the padded
    steps run uncaptured."""
    model = load("nano", device=device, dtype="bfloat16" if device == "cuda" else "float32")
    seconds = list[float]()
    with uncaptured():
        plain, static = (
            _decode(model, "dual", cuda_graphs=graphs, seconds=seconds) for graphs in (False, True)
        )
    differing = sum(a != b for a, b in zip(plain, static, strict=True))
    kind = "CUDA graphs" if device == "cuda" else "padded steps (no GPU: not captured)"
    text = f"{differing} of {len(PROMPTS)} texts differ from plain steps"
    if device == "cuda":
        text += f"; {seconds[1] / seconds[0]:.2f} of their time on the bundled model"
    yield Check(kind, differing == 0, text, "cuda_graphs=False")


def batches(device: str) -> Iterator[Check]:
    """Rows of a batch against the same rows alone, in float32 and in what "auto" would be."""
    for dtype in ["float32", *(["bfloat16"] if device == "cuda" else [])]:
        model = load("nano", device=device, dtype=dtype)
        for cache in CACHES:
            together = _decode(model, cache)
            alone = [_decode(model, cache, prompts=[prompt])[0] for prompt in PROMPTS]
            differing = sum(a != b for a, b in zip(together, alone, strict=True))
            yield Check(
                f"batch = alone, {dtype}, cache {cache}", differing == 0,
                f"{differing} of {len(alone)} texts differ", "max_batch_size=1",
            )  # fmt: skip


def _decode(
    model: DiffusionModel, cache: str, prompts: Sequence[str] = PROMPTS, cuda_graphs: bool = False,
    seconds: list[float] | None = None,
) -> list[list[int]]:  # fmt: skip
    """Their tokens; ``seconds`` gains the time of a third round: graphs are captured before."""
    if seconds is None:
        results = generate(model, list(prompts), cache=cache, **CHOSEN)
        return [list(result.tokens) for result in results]
    with Session(model, cache=cache, cuda_graphs=cuda_graphs) as session:
        for _ in range(3):
            began = time.perf_counter()
            handles = [session.submit(prompt, **CHOSEN) for prompt in prompts]
            found = [list(handle.result().tokens) for handle in handles]
        seconds.append(time.perf_counter() - began)
    return found
