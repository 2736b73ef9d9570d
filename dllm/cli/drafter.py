"""``dllm serve-drafter``: a drafter that verifiers in other processes ask over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from ..access import KEY
from ..errors import ConfigError, missing
from .options import remember_debug
from .output import note, waiting
from .serve import warn_open


def serve_drafter(
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Diffusion model or lookup; repeatable: the first with a draft."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8100,
    search: Annotated[
        str | None, typer.Option(help="How marginals become a draft, of every model named.")
    ] = None,
    window: Annotated[int, typer.Option(help="Masks a diffusion model sees.", min=1)] = 32,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    api_key: Annotated[
        str | None, typer.Option(help="What verifiers must know.", envvar=KEY)
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", callback=remember_debug, help="Show tracebacks of errors.")
    ] = False,
) -> None:
    """Serve drafts; a verifier uses them with --drafter "remote(url='http://HOST:PORT')".

    With a key verifiers find it in the environment, as DLLM_API_KEY.
    """
    from ..drafting import DiffusionDrafter
    from ..drafting.base import DRAFTERS, Drafter, single
    from ..drafting.bridges.service import Service
    from ..drafting.dflash.checkpoint import is_block_drafter
    from ..drafting.drafters.several import FirstOf
    from ..drafting.naming import is_drafter_spec
    from ..drafting.vocabulary import fingerprint
    from ..models import load

    try:
        from ..serve.drafts import DraftServer
        from ..serve.run import run
        from ..serve.settings import Settings
    except ImportError as error:
        raise missing(str(error.name), "serve") from error

    parts: list[Drafter] = []
    vocabularies = set()
    for name in drafter or ["nano"]:
        if is_drafter_spec(name):
            parts.append(single(name, DRAFTERS, Drafter))
            continue
        if is_block_drafter(name):
            raise ConfigError(
                f"{name} reads the verifier's hidden states, which do not travel: run it beside "
                "the verifier, `dllm serve VERIFIER --drafter ...`"
            )
        with waiting(f"loading {name}"):
            model = load(name, dtype=dtype, device=device)
        parts.append(DiffusionDrafter(model, search=search, window=window))
        if model.tokenizer is not None:
            vocabularies.add(fingerprint(model.tokenizer, model.facts.vocab_size))
    if len(vocabularies) > 1:
        raise ConfigError("the drafters use different vocabularies: serve each on its own port")
    drafts = Service(FirstOf(tuple(parts)), next(iter(vocabularies), ""))
    settings = Settings(page=False, api_key=api_key)
    warn_open(host, api_key)
    run(DraftServer(drafts, settings), host, port, lambda url: note(f"drafting at {url}"))
