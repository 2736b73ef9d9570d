"""``dllm batch``: a file of requests, answered by the continuous engine."""

import asyncio
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..core.config import GenerationConfig
from ..core.declared import MACHINE, about_of
from ..core.errors import ConfigError
from .options import EVERY, MODEL, RAW, Decoding, Loading, option, takes
from .output import Ticker, interactive, note, stderr

if TYPE_CHECKING:
    from ..serve.batch import Line, Results
    from ..serve.settings import Settings

# Options of the help page; --help-all has all.
SHOWN = (
    "output model sampler cache max_new_tokens temperature "
    "seed json_schema regex choice quantization max_batch_size ray"
).split()
TOLD = 3  # errors that are shown
FAILED = 1  # exit status: some requests have an error for a result
FORMS = {"regex": "regex", "choice": "choice", "json_schema": "json"}
SERVED = ("max_batch_tokens", "cuda_graphs")  # of the engine, not of a request


@dataclass(frozen=True, kw_only=True)
class Batched(Decoding):
    """Options of ``dllm batch``."""

    PARAMETERS = EVERY

    output: Path | None = option(None, "File of the results, default REQUESTS.results.jsonl.", None)
    max_batch_size: int = option(16, "Sequences decoded at a time, default 16.", MODEL, min=1)
    raw: bool = RAW()
    ray: int = option(
        0, "Engines, as actors of Ray Data (default 0: one, in this process).", MODEL, min=0
    )

    def settings(self) -> "Settings":
        from ..serve.settings import Settings

        return Settings(
            sampler=self.sampler, caches=(self.parts()["cache"],),
            max_batch_size=self.max_batch_size,
            **{name: self.how[name] for name in SERVED if name in self.how},
        )  # fmt: skip


def fields(options: Batched) -> dict[str, Any]:
    """What the options are called in a request."""
    declared = GenerationConfig.fields()
    given = {
        about_of(declared[name]).wire or name: value for name, value in options.how.items()
        if name not in GenerationConfig.fields(MACHINE)
    }  # fmt: skip
    if "stop" in given:
        given["stop"] = list(given["stop"])
    if "constraints" in given:
        given["constraints"] = {str(at): text for at, text in given["constraints"].items()}
    form = {sent: given.pop(name) for name, sent in FORMS.items() if name in given}
    if "json" in form:
        from ..structured.source import schema_of

        form["json"] = schema_of(form["json"])
    return given | ({"structured_outputs": form} if form else {})


@takes(Batched)
def batch(
    requests: Annotated[Path, typer.Argument(help="OpenAI's batch file, or a prompt per line.")],
    *,
    options: Batched,
) -> None:
    """Answer a file of requests.  Run it again to go on after an interruption.

    The results are in OpenAI's format, in the order in which they were ready; a request that fails
    has its error there, and the exit status is then 1.
    """
    from ..serve.batch import Lines, Results, open_requests

    if not requests.is_file():
        raise ConfigError(f"{requests} is no file: name a file of requests")
    target = options.output or requests.with_suffix(".results.jsonl")
    if target.resolve() == requests.resolve():
        raise ConfigError("the results would overwrite the requests: name another file with -o")
    lines = Lines(requests, fields(options), not options.raw)
    loaded = {field.name: getattr(options, field.name) for field in dataclass_fields(Loading)}
    with Results(target, {"model": options.model, **options.parts(), **loaded}) as results:
        count, open_lines = open_requests(lines, results)
        if not count and not results.done:
            raise ConfigError(f"{requests} holds no requests: write one per line")
        if results.done:
            errors = f" ({results.failures} errors)" if results.failures else ""
            there = f"{len(results.done)} results are there already{errors}"
            note(f"{there}, {count} requests are open")
        failures = _run(options, open_lines, count, results) if count else 0
    note(f"{count} answered, {failures} of them with an error: {target}")
    if failures or results.failures:
        raise typer.Exit(FAILED)


def _run(options: Batched, lines: Any, count: int, results: "Results") -> int:
    """Answer ``lines``; how many of them failed."""
    from ..serve.batch import answer_all, batch_settings, error_of, failed

    answered, failures, lines_now = 0, 0, Ticker()
    columns = ("{task.description}", BarColumn(), "{task.completed}/{task.total}",
               TextColumn("{task.fields[failed]}"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=stderr(), disable=not interactive()) as bar:
        task = bar.add_task("requests", total=count, failed="")

        def done(line: "Line", entry: dict[str, Any]) -> None:
            nonlocal answered, failures
            answered += 1
            results.add(line, entry)
            failures += failed(entry)
            if failed(entry) and failures <= TOLD:
                more = "; further errors stand in the results" * (failures == TOLD)
                note(f"{line.id}: {error_of(entry)}{more}")
            failed_too = f"{failures} failed" if failures else ""
            bar.update(task, advance=1, failed=failed_too)
            lines_now.tell(f"{answered} of {count} answered" + (", " + failed_too) * bool(failures))

        if options.ray:
            from ..serve.cluster import join

            join()  # before Ray is imported
            from ..serve.ray import answer_with_ray

            answer_with_ray(
                options.model, lines, done, options.ray, options.settings(), options.loading
            )
            return failures
        from ..serve.service import Service

        service = Service(options.load(), batch_settings(options.settings()))
        try:
            asyncio.run(answer_all(service, lines, done))
        except KeyboardInterrupt:
            note(f"stopped: {answered} of {count} answered; the same command goes on")
            raise
        finally:
            service.close()
    return failures
