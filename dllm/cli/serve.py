"""``dllm serve``: a model behind an OpenAI API."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from ..access import KEY
from ..errors import UnknownNameError
from .options import MODEL, Loading, option, takes
from .output import note

if TYPE_CHECKING:
    from ..serve.service import Service
    from ..serve.settings import Settings

LEVELS = ("debug", "info", "warning", "error")
NETWORK, ENGINE, LIMITS = "Network", "Engine", "Limits"


@dataclass(frozen=True, kw_only=True)
class Networked(Loading):
    """Where a server listens, and who may ask it."""

    host: Annotated[str, option("Address to listen on, default 127.0.0.1.", NETWORK)] = "127.0.0.1"
    port: Annotated[int, option("0 takes a free one.", NETWORK, min=0, max=65535)] = 8000
    api_key: Annotated[str | None, option("What clients must know.", NETWORK, envvar=KEY)] = None

    def warn_open(self) -> None:
        """Say so when other machines need no key."""
        if self.api_key is None and self.host not in ("127.0.0.1", "localhost", "::1"):
            note(f"anybody who reaches {self.host} may use this server: --api-key asks for a key")


@dataclass(frozen=True, kw_only=True)
class Served(Networked):
    """Options of ``dllm serve``.  What `Settings` calls the same is handed on."""

    name: Annotated[str | None, option("What clients call the model.", NETWORK)] = None
    page: Annotated[bool, option("The page at '/', default on.", NETWORK, "--page/--no-page")] = (
        True
    )
    tool_parser: Annotated[
        str | None,
        option("How the model writes calls of tools: hermes or llama, default as its chat template "
               "says.", NETWORK),
    ] = None  # fmt: skip
    log_level: Annotated[
        str, option("debug, info (default: a line per request), warning or error.", NETWORK)
    ] = "info"
    metrics_names: Annotated[str, option("At /metrics: dllm (default) or vllm.", NETWORK)] = "dllm"
    sampler: Annotated[
        str | None, option("Of requests that name none, default threshold.", ENGINE, "-s")
    ] = None
    length: Annotated[
        str | None,
        option("How answers find their length, of requests that do not say; max_tokens is then the "
               "most.  Default fixed.", ENGINE),
    ] = None  # fmt: skip
    cache: Annotated[
        list[str] | None,
        option("Repeatable: requests choose, default the first.  Default none.", ENGINE, "-c"),
    ] = None
    drafter: Annotated[
        list[str] | None,
        option("Of an autoregressive model: what proposes its tokens; repeatable.", ENGINE),
    ] = None
    max_rows: Annotated[int, option("Requests written at a time, default 16.", ENGINE, min=1)] = 16
    max_positions: Annotated[
        int | None, option("Room for keys and values, of all rows.", ENGINE)
    ] = None
    max_batch_tokens: Annotated[int | None, option("Most positions of a forward.", ENGINE)] = None
    keep_prefixes: Annotated[
        int | None,
        option("Of an autoregressive model, or with the cache block or wedlm: tokens of complete "
               "texts kept for those that begin like them, default 16384; 0: none.", ENGINE, min=0),
    ] = None  # fmt: skip
    cuda_graphs: Annotated[bool, option("Replay cached steps.", ENGINE)] = False
    compile: Annotated[bool, option("Pass them through torch.compile.", ENGINE)] = False
    max_waiting: Annotated[
        int, option("Requests in the queue, default 64; more get 429.", LIMITS)
    ] = 64
    deadline: Annotated[float, option("Seconds for a request, default 600.", LIMITS)] = 600.0
    drain: Annotated[float, option("Seconds for what runs at SIGTERM, default 30.", LIMITS)] = 30.0
    max_body: Annotated[int, option("Bytes of a request, default 8 MiB.", LIMITS)] = 8 * 2**20
    max_prompt_tokens: Annotated[int | None, option("Of a prompt.", LIMITS)] = None
    replicas: Annotated[
        int, option("Copies of the model, in Ray Serve; 0 (default): one, here.", MODEL, min=0)
    ] = 0

    def settings(self) -> Settings:
        """As `Settings`; typos in names of parts are found before anything is loaded."""
        from ..serve.settings import Settings

        same = {field.name for field in fields(Settings)} & {field.name for field in fields(self)}
        settings = Settings(
            caches=tuple(self.cache or ("none",)), drafters=tuple(self.drafter or ()),
            **{name: getattr(self, name) for name in same},
        )  # fmt: skip
        check_parts(settings)
        return settings

    def log(self) -> None:
        """Begin to log."""
        if self.log_level.lower() not in LEVELS:
            raise UnknownNameError("log level", self.log_level, LEVELS)
        logging.basicConfig(
            level=logging.WARNING, stream=sys.stderr,
            format="%(asctime)s %(name)s %(levelname)s %(message)s",
        )  # fmt: skip
        logging.getLogger("dllm").setLevel(self.log_level.upper())


@takes(Served)
def serve(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or nano.")] = "nano",
    *,
    options: Served,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect it."""
    settings = options.settings()
    options.log()
    options.warn_open()
    if replicas := options.replicas:
        from ..serve.ray import serve_replicas

        host, port = options.host, options.port
        serve_replicas(model, settings, replicas, host, port, options.loading, note)
    else:
        from ..serve.service import Service

        _here(Service(options.load_model(model), settings), options)


def check_parts(settings: Settings) -> None:
    """Find typos in names of parts."""
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


def _here(service: Service, options: Served) -> None:
    """Serve in this process."""
    from ..serve.run import run

    def ready(url: str) -> None:
        page = f", the page at {url}/" if options.page else ""
        note(f"{service.name} at {url}/v1{page}")

    level = "info" if options.log_level.lower() == "debug" else "warning"  # of uvicorn
    run(service, options.host, options.port, ready, level)
