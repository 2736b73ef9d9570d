"""``dllm serve``: a model behind an OpenAI API."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import typer

from ..core.access import KEY
from ..core.errors import ConfigError, UnknownNameError
from ..serve.settings import Settings
from .options import MODEL, Loading, option, takes
from .output import note

# Options of the help page; --help-all has all.
SHOWN = (
    "host port api_key sampler cache drafter "
    "max_batch_size max_waiting quantization device threads replicas"
).split()
LEVELS = ("debug", "info", "warning", "error")
NETWORK, LOCAL = "Network", "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Served(Loading):
    """Options of ``dllm serve``, and those that `Settings` declares."""

    DECLARED: ClassVar = Settings
    PARAMETERS: ClassVar = Settings.fields().keys() - {"api_key", "write_patience"}
    host: str = option(LOCAL, "Address to listen on, default 127.0.0.1.", NETWORK)
    port: int = option(
        8000, "Port to listen on, default 8000 (0: a free one).", NETWORK, min=0, max=65535
    )
    api_key: str | None = option(None, "API key that clients must send.", NETWORK, envvar=KEY)
    log_level: str = option(
        "info", "Log level: debug, info (default: a line per request), warning or error.", NETWORK
    )
    replicas: int = option(
        0, "Replicas of the model in Ray Serve (default 0: one, in this process).", MODEL, min=0
    )
    ray_host: str = option(
        LOCAL, "Address of the Ray that --replicas starts (default 127.0.0.1: no other "
        "machine can join).", MODEL,
    )  # fmt: skip
    how: Mapping[str, Any] = field(default_factory=dict)


@takes(Served)
def serve(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or nano.")] = "nano",
    *,
    options: Served,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect it."""
    settings = Settings(**options.how, api_key=options.api_key)
    check_parts(settings)
    if options.ray_host != LOCAL and not options.replicas:
        raise ConfigError("--ray-host is for the Ray that --replicas starts: give --replicas, too")
    if options.log_level.lower() not in LEVELS:
        raise UnknownNameError("log level", options.log_level, LEVELS)
    from ..serve.run import log_to_stderr

    log_to_stderr(options.log_level)
    if options.api_key is None and options.host not in (LOCAL, "localhost", "::1"):
        note(f"anybody who reaches {options.host} may use this server: --api-key asks for a key")
    try_tokenizer(model, options.tokenizer)
    if replicas := options.replicas:
        from ..serve.cluster import serve_replicas

        serve_replicas(
            model, settings, replicas, options.host, options.port, options.loading, note,
            options.ray_host, options.log_level,
        )  # fmt: skip
    else:
        from ..serve.run import listen, run
        from ..serve.service import Service

        listen(options.host, options.port, 1).close()  # fails before the model is loaded
        service = Service(options.load_model(model), settings)

        def ready(url: str) -> None:
            page = f", the page at {url}/" if settings.page else ""
            note(f"{service.name} at {url}/v1{page}")

        level = "info" if options.log_level.lower() == "debug" else "warning"  # of uvicorn
        run(service, options.host, options.port, ready, level)


def try_tokenizer(model: str, given: str | None) -> None:
    """Find tokenizers and chat templates that would hold the server before it starts."""
    from ..models.checkpoint import BUNDLED, find, open_checkpoint
    from ..models.gguf import SUFFIX
    from ..models.probe import probe
    from ..models.reading import family_of
    from ..models.tokenizer import loader_of

    source, native = given or model, not model.endswith(SUFFIX)
    if source not in BUNDLED and not source.endswith(SUFFIX):
        family = family_of(open_checkpoint(model)) if native else None
        folder = find(source)[0]
        probe(folder, loader_of(family, folder) if family else "AutoTokenizer")


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
