"""``dllm bench``: samplers, caches and their parameters on tasks, as curves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import ConfigError
from .options import DECODING, MODEL, OUTPUT, option, remember_debug, takes
from .output import interactive, note, stderr, waiting

if TYPE_CHECKING:
    from ..eval.measure import Cell, Record
    from ..eval.sweep import Sweep

SWEEP = "Sweep"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Options of ``dllm bench``."""

    model: Annotated[
        str, option("--model", "-m", panel=MODEL, text="Hub id, folder, or nano (default).")
    ] = "nano"
    dtype: Annotated[str, option("--dtype", panel=MODEL, text="Default auto.")] = "auto"
    device: Annotated[str, option("--device", panel=MODEL, text="Default auto.")] = "auto"
    preset: Annotated[
        str | None, option("--preset", panel=SWEEP, text="A named sweep: readme, quick.")
    ] = None
    tasks: Annotated[
        str | None, option("--tasks", "-t", panel=SWEEP, text="Names or .jsonl files, by commas.")
    ] = None
    sampler: Annotated[
        list[str] | None,
        option("--sampler", "-s", panel=SWEEP, text="A setting; {a,b} means several values."),
    ] = None
    curve: Annotated[
        list[str] | None,
        option("--curve", panel=SWEEP, text="A sampler whose whole curve is measured; or 'all'."),
    ] = None
    cache: Annotated[
        list[str] | None, option("--cache", "-c", panel=SWEEP, text="Default none; repeatable.")
    ] = None
    confirm_run_unsafe_code: Annotated[
        bool,
        option("--confirm-run-unsafe-code", panel=SWEEP, text="Let humaneval run answers."),
    ] = False
    examples: Annotated[
        int | None, option("--examples", "-n", panel=SWEEP, text="Per task, default 100.", min=1)
    ] = None
    rows: Annotated[
        int | None, option("--rows", panel=SWEEP, text="Prompts together, default 32.", min=1)
    ] = None
    seed: Annotated[
        int | None, option("--seed", panel=SWEEP, text="Of the examples, default 0.", min=0)
    ] = None
    max_new_tokens: Annotated[
        int | None, option("--max-new-tokens", panel=DECODING, text="Positions of the canvas.")
    ] = None
    block_length: Annotated[
        int | None, option("--block-length", panel=DECODING, text="Positions of a block.")
    ] = None
    threads: Annotated[
        int | None, option("--threads", panel=DECODING, text="CPU threads, default all.", min=1)
    ] = None
    output: Annotated[
        Path, option("--output", "-o", panel=OUTPUT, text="Folder, default runs/bench.")
    ] = Path("runs/bench")
    plot: Annotated[
        bool, option("--plot/--no-plot", panel=OUTPUT, text="Draw pareto.svg and pareto.png.")
    ] = True
    debug: Annotated[
        bool,
        option("--debug", panel=OUTPUT, text="Show tracebacks.", callback=remember_debug),
    ] = False


@takes(Bench)
def bench(*, options: Bench) -> None:
    """Measure accuracy, forwards, positions and seconds of samplers and caches.

    A sweep that was stopped goes on where it was; --preset quick takes seconds.
    """
    from ..eval import report
    from ..eval.plot import check_plots, pareto
    from ..eval.sweep import Journal, run

    if options.plot:
        check_plots()
    sweeps = _sweeps(options)
    cells = list({repr(cell): cell for sweep in sweeps for cell in sweep.cells()}.values())
    refused = {label: why for sweep in sweeps for label, why in sweep.refused().items()}
    journal = Journal(options.output / "results.jsonl")
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)
    with waiting(f"loading {options.model}"):
        from ..models import load

        model = load(options.model, dtype=options.dtype, device=options.device)
    records = run(model, cells, journal, tell, options.confirm_run_unsafe_code, refused)
    if not records:
        raise ConfigError(next(iter(refused.values()), "there is nothing to measure"))
    for label, reason in refused.items():
        note(f"left out {label}: {reason}")
    texts = {
        "table.md": report.full_table(records),
        "areas.md": report.area_table(records),
        "caches.md": report.cache_table(records),
        "fastest.md": report.fastest_table(records),
    }
    for name, text in texts.items():
        (options.output / name).write_text(text + "\n", encoding="utf-8")
    if options.plot:
        pareto(records, [options.output / f"pareto.{kind}" for kind in ("svg", "png")])
    print(texts["table.md"])
    note(f"{len(records)} records in {options.output}")


def _sweeps(options: Bench) -> list[Sweep]:
    from ..eval.curves import samplers_with_curves
    from ..eval.presets import preset
    from ..eval.sweep import Sweep

    changes: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("examples", "rows", "seed")
        if getattr(options, name) is not None
    }
    tasks = [name.strip() for name in (options.tasks or "").split(",") if name.strip()]
    canvas = {
        name: getattr(options, name)
        for name in ("max_new_tokens", "block_length")
        if getattr(options, name) is not None
    }
    if options.preset is not None:
        if options.sampler or options.curve or options.cache or canvas:
            raise ConfigError("a preset says what to measure: drop --preset or the other options")
        return [replace(s, **changes, tasks=tasks or s.tasks) for s in preset(options.preset)]
    curves = samplers_with_curves() if "all" in (options.curve or ()) else options.curve or []
    samplers = options.sampler or ([] if curves else ["threshold"])
    canvas.setdefault("max_new_tokens", 64)
    return [
        Sweep(tasks, samplers, curves, options.cache or ["none"],
              arguments=tuple(sorted(canvas.items())), **changes)
    ]  # fmt: skip


def tell(done: int, total: int, cell: Cell, record: Record | None) -> None:
    """One line per cell; on a terminal also what is being measured."""
    if record is None:
        if interactive():
            stderr().print(f"{done}/{total} {cell.task} {cell.setting.label} …", style="dim")
        return
    note(
        f"{done}/{total} {cell.task:12} {cell.setting.label:32} {100 * record.accuracy:5.1f} % "
        f"{record.point[0]:6.2f} tokens per forward {record.seconds:7.2f} s"
    )
