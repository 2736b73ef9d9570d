"""``dllm generate --verifier``: the model drafts, an autoregressive one verifies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..core.config import GenerationConfig
from ..core.declared import VERIFIER
from ..core.errors import ConfigError
from .output import MEASURED, note, versions, waiting

if TYPE_CHECKING:
    from ..drafting import SpeculativeResult
    from .generate_options import Answers

FIGURES = ("drafted", "accepted", "accepted_per_round", "acceptance_rate", "drafter", "rule",
           "lossy", "deviations")  # fmt: skip


def speculate(prompts: list[Any], options: Answers) -> None:
    """Answers of the verifier on stdout, figures on stderr."""
    given = options.arguments()
    theirs = GenerationConfig.fields(VERIFIER)
    for name in given:
        if name not in theirs:
            raise ConfigError(
                f"--{name.replace('_', '-')} is not an option of a verifier: leave it out"
            )
    if options.watch or options.trace is not None:
        raise ConfigError("--watch and --trace follow a canvas: leave them out with --verifier")
    for result in _run(prompts, options, given):
        print(as_json(result, options) if options.json else result.text, flush=True)
        if not options.json:
            note(result.footer())


def _run(prompts: list[Any], options: Answers, given: dict[str, Any]) -> list[SpeculativeResult]:
    from .. import drafting
    from ..drafting.dflash.drafter import BlockDrafter

    parts = {n: getattr(options, n) for n in ("rule", "controller") if getattr(options, n)}
    assert options.verifier is not None
    verifier = options.load_model(options.verifier)
    with waiting("loading drafters"):
        drafters = [_load(name.strip(), options) for name in options.drafters]
    searching = (drafting.DiffusionDrafter, BlockDrafter)
    if options.search and not any(isinstance(d, searching) for d in drafters):
        raise ConfigError("--search is for diffusion drafters: leave it out, or name one")
    drafter = drafters[0] if len(drafters) == 1 else drafters or None
    results: list[SpeculativeResult] = drafting.speculate(
        verifier, drafter, prompts, chat=False if options.raw else None, **parts, **given
    )
    return results


def _load(name: str, options: Answers) -> Any:
    from ..drafting import DiffusionDrafter
    from ..drafting.dflash.checkpoint import is_block_drafter
    from ..drafting.naming import is_drafter_spec, make_drafter
    from ..models import load

    if is_drafter_spec(name):
        return make_drafter(name)
    if is_block_drafter(name):
        return make_drafter(name, **({"search": options.search} if options.search else {}))
    model = load(name, dtype=options.dtype, device=options.device)
    return DiffusionDrafter(model, search=options.search)


def as_json(result: SpeculativeResult, options: Answers) -> str:
    """One line of JSON: text, figures, and what determined them."""
    names = [name for name in MEASURED if name not in ("forced", "sampler", "cache")]
    payload: dict[str, Any] = {name: getattr(result, name) for name in (*names, *FIGURES)}
    payload |= {
        "verifier": options.verifier,
        "survival": [round(float(share), 4) for share in result.survival],
        "shares": result.shares,
        "versions": versions(),
    }
    return json.dumps(payload, ensure_ascii=False)
