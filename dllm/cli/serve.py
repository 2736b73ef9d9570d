"""``dllm serve``: a model behind an OpenAI API."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..access import KEY
from ..errors import ConfigError, UnknownNameError
from .options import remember_debug
from .output import note, waiting

if TYPE_CHECKING:
    from ..serve.service import Service
    from ..serve.settings import Settings

LEVELS = ("debug", "info", "warning", "error")
NETWORK, ENGINE, LIMITS, CLUSTER = "Network", "Engine", "Limits", "More than one machine"


def serve(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or nano.")] = "nano",
    host: Annotated[
        str, typer.Option(help="Address to listen on.", rich_help_panel=NETWORK)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="0 takes a free one.", min=0, max=65535, rich_help_panel=NETWORK)
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(help="What clients must know.", envvar=KEY, rich_help_panel=NETWORK),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="What clients call the model.", rich_help_panel=NETWORK),
    ] = None,
    page: Annotated[bool, typer.Option(help="The page at '/'.", rich_help_panel=NETWORK)] = True,
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes calls of tools: hermes or llama.",
            show_default="as its chat template says",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    log_level: Annotated[
        str,
        typer.Option(
            help="debug, info (a line per request), warning or error.", rich_help_panel=NETWORK
        ),
    ] = "info",
    metrics_names: Annotated[
        str, typer.Option(help="Names at /metrics: dllm or vllm.", rich_help_panel=NETWORK)
    ] = "dllm",
    sampler: Annotated[
        str | None,
        typer.Option(
            "--sampler",
            "-s",
            help="Of requests that name none.",
            rich_help_panel=ENGINE,
            show_default="threshold",
        ),
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(
            help="How answers find their length, of requests that do not say; max_tokens is then "
            "the most.",
            rich_help_panel=ENGINE,
            show_default="fixed",
        ),
    ] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            "--cache",
            "-c",
            help="Repeatable: requests choose, default the first.",
            rich_help_panel=ENGINE,
            show_default="none",
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Of an autoregressive model: what proposes its tokens; repeatable.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=ENGINE)
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, ...", rich_help_panel=ENGINE)
    ] = "auto",
    adapter: Annotated[
        str | None, typer.Option(help="Low-rank adapter of the model.", rich_help_panel=ENGINE)
    ] = None,
    max_rows: Annotated[
        int, typer.Option(help="Requests written at a time.", min=1, rich_help_panel=ENGINE)
    ] = 16,
    max_positions: Annotated[
        int | None,
        typer.Option(help="Room for keys and values, of all rows.", rich_help_panel=ENGINE),
    ] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(help="Most positions of a forward.", rich_help_panel=ENGINE)
    ] = None,
    full_step_tokens: Annotated[
        int | None,
        typer.Option(help="Most positions of whole canvases in a step.", rich_help_panel=ENGINE),
    ] = None,
    keep_prefixes: Annotated[
        int | None,
        typer.Option(
            help="Of an autoregressive model: tokens of complete texts kept for those that begin "
            "like them; 0: none.  Default: 16384.",
            min=0,
            rich_help_panel=ENGINE,
        ),
    ] = None,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="Replay cached steps.", rich_help_panel=ENGINE)
    ] = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="torch.compile.", rich_help_panel=ENGINE)
    ] = False,
    max_waiting: Annotated[
        int, typer.Option(help="Requests in the queue; more get 429.", rich_help_panel=LIMITS)
    ] = 64,
    deadline: Annotated[
        float, typer.Option(help="Seconds for a request.", rich_help_panel=LIMITS)
    ] = 600.0,
    drain: Annotated[
        float, typer.Option(help="Seconds for what runs at SIGTERM.", rich_help_panel=LIMITS)
    ] = 30.0,
    max_body: Annotated[int, typer.Option(help="Bytes of a request.", rich_help_panel=LIMITS)] = 8
    * 2**20,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Of a prompt.", rich_help_panel=LIMITS)
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            help="Copies of the model, in Ray Serve; 0: one, here.", min=0, rich_help_panel=CLUSTER
        ),
    ] = 0,
    debug: Annotated[
        bool, typer.Option("--debug", callback=remember_debug, help="Show tracebacks and a log.")
    ] = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect it."""
    from ..serve.settings import Settings

    settings = Settings(
        name=name, sampler=sampler, length=length, caches=tuple(cache or ("none",)),
        drafters=tuple(drafter or ()), max_rows=max_rows,
        max_waiting=max_waiting, max_positions=max_positions, max_batch_tokens=max_batch_tokens,
        full_step_tokens=full_step_tokens, keep_prefixes=keep_prefixes,
        cuda_graphs=cuda_graphs, compile=compile,
        deadline=deadline, drain=drain, max_body=max_body, max_prompt_tokens=max_prompt_tokens,
        api_key=api_key, metrics_names=metrics_names, page=page, tool_parser=tool_parser,
    )  # fmt: skip
    level = "debug" if debug else log_level.lower()
    if level not in LEVELS:
        raise UnknownNameError("log level", log_level, LEVELS)
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
    )  # fmt: skip
    logging.getLogger("dllm").setLevel(level.upper())
    check_parts(settings)
    warn_open(host, api_key)
    loading = {"dtype": dtype, "device": device}
    if adapter is not None:
        loading["adapter"] = adapter
    split = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ  # by torchrun
    if replicas and split:
        raise ConfigError("--replicas starts processes of its own: drop it under torchrun")
    if replicas:
        from ..serve.ray import serve_replicas

        serve_replicas(model, settings, replicas, host, port, loading, note)
        return
    if split:
        _split(model, settings, host, port, loading, debug)
        return
    from ..models import load
    from ..serve.service import Service

    with waiting(f"loading {model}"):
        arguments: dict[str, Any] = loading
        loaded = load(model, **arguments)
    _here(Service(loaded, settings), host, port, debug)


def check_parts(settings: Settings) -> None:
    """Find typos in names of parts before anything is loaded."""
    from ..cache import compose as compose_cache
    from ..drafting.base import DRAFTERS, Drafter, single
    from ..drafting.naming import is_drafter_spec
    from ..samplers import compose
    from ..serve.tools import syntax_of

    for cache in settings.caches:
        compose_cache(cache)
    if settings.sampler is not None:
        compose(settings.sampler)
    syntax_of("", settings.tool_parser)
    for name in settings.drafters:
        if is_drafter_spec(name):
            single(name, DRAFTERS, Drafter)


def warn_open(host: str, api_key: str | None) -> None:
    """Say so when other machines need no key."""
    if api_key is None and host not in ("127.0.0.1", "localhost", "::1"):
        note(f"anybody who reaches {host} may use this server: --api-key asks for a key")


def _here(service: Service, host: str, port: int, debug: bool) -> None:
    """Serve in this process."""
    from ..serve.run import run

    def ready(url: str) -> None:
        page = f", the page at {url}/" if service.settings.page else ""
        note(f"{service.name} at {url}/v1{page}")

    run(service, host, port, ready, "info" if debug else "warning")


def _split(
    model: str, settings: Settings, host: str, port: int, loading: dict[str, str], debug: bool
) -> None:
    """Under ``torchrun``: this process is one rank of several that share the model."""
    from ..serve.ranks import follow, joined, load_share
    from ..serve.service import Service

    if len(settings.caches) > 1:
        raise ConfigError(
            "ranks take the same steps in one order, and every cache has steps of its own: serve "
            "one --cache under torchrun"
        )
    with joined() as channel:
        loaded = load_share(model, loading)
        if channel.rank == 0:
            _here(Service(loaded, settings, channel), host, port, debug)
        else:
            follow(channel, loaded, settings.session(settings.caches[0]))
