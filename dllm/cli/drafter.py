"""``dllm serve-drafter``: a drafter that verifiers in other processes ask over HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..errors import ConfigError
from .options import MODEL, option, takes
from .output import note
from .serve import NETWORK, Networked


@dataclass(frozen=True, kw_only=True)
class Drafting(Networked):
    """Options of ``dllm serve-drafter``."""

    port: Annotated[int, option("0 takes a free one, default 8100.", NETWORK, min=0, max=65535)] = (
        8100
    )
    drafter: Annotated[
        list[str] | None,
        option(
            "Diffusion model (default nano) or lookup; repeatable: the first with a draft.", MODEL
        ),
    ] = None
    search: Annotated[
        str | None, option("How marginals become a draft, of every model named.", MODEL)
    ] = None
    window: Annotated[int, option("Masks a model sees, default 32.", MODEL, min=1)] = 32


@takes(Drafting)
def serve_drafter(*, options: Drafting) -> None:
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
    from ..serve.drafts import DraftServer
    from ..serve.run import run
    from ..serve.settings import Settings

    parts: list[Drafter] = []
    names = options.drafter or ["nano"]
    for name in names:
        if not is_drafter_spec(name) and is_block_drafter(name):
            raise ConfigError(
                f"{name} reads the verifier's hidden states, which do not travel: run it beside "
                "the verifier, `dllm serve VERIFIER --drafter ...`"
            )
    if options.adapter and sum(not is_drafter_spec(name) for name in names) > 1:
        raise ConfigError("--adapter belongs to one model: serve each drafter on its own port")
    vocabularies = set()
    for name in names:
        if is_drafter_spec(name):
            parts.append(single(name, DRAFTERS, Drafter))
            continue
        model = options.load_model(name)
        parts.append(DiffusionDrafter(model, search=options.search, window=options.window))
        if model.tokenizer is not None:
            vocabularies.add(fingerprint(model.tokenizer, model.facts.vocab_size))
    if len(vocabularies) > 1:
        raise ConfigError("the drafters use different vocabularies: serve each on its own port")
    drafts = Service(FirstOf(tuple(parts)), next(iter(vocabularies), ""))
    options.warn_open()
    server = DraftServer(drafts, Settings(page=False, api_key=options.api_key))
    run(server, options.host, options.port, lambda url: note(f"drafting at {url}"))
