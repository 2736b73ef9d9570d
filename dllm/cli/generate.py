"""``dllm generate``: answers to prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..core.config import GenerationConfig
from ..core.declared import MACHINE
from ..core.errors import ConfigError
from .bundled import warn_of_unknown_words
from .inputs import read_prompts
from .options import Answers, Prompt, takes
from .output import MEASURED, as_json, note, save_trace, shown, trace_files, versions, waiting
from .watch import watch

if TYPE_CHECKING:
    from ..drafting import SpeculativeResult
    from ..models import DiffusionModel
    from ..runtime.result import Result

# Options of the help page; --help-all has all.
SHOWN = (
    "file model sampler cache max_new_tokens block_length temperature seed "
    "json_schema regex choice verifier drafter quantization watch json"
).split()
FIGURES = ("drafted", "accepted", "accepted_per_round", "acceptance_rate", "drafter", "rule",
           "lossy", "deviations")  # fmt: skip


@takes(Answers)
def generate(prompt: Prompt = None, *, options: Answers) -> None:
    """Answer a prompt.  The answer goes to stdout, figures and --watch to stderr.

    For many prompts, and to resume after an interruption, use dllm batch.
    """
    prompts = read_prompts(prompt, options.file)
    for name in ("drafter", "search", "rule", "controller"):
        if getattr(options, name) and options.verifier is None:
            raise ConfigError(f"--{name} goes with --verifier: name the model that verifies")
    if options.verifier is not None:
        return speculate(prompts, options)
    files = trace_files(options.trace, len(prompts))
    model = options.load()
    for number, result in enumerate(answers(model, prompts, options)):
        if files:
            save_trace(result, files[number])
        about = {"prompt": prompts[number], "arguments": settled(options)}
        print(as_json(result, model, about) if options.json else shown(result.text), flush=True)
        if not options.json or options.watch:
            note(result.footer())
    warn_of_unknown_words(model, prompts)


def answers(model: DiffusionModel, prompts: list[str], options: Answers) -> Iterator[Result]:
    """The results in the order of the prompts, each as soon as it is its turn."""
    from ..api import as_completed, stream

    given: dict[str, Any] = {**options.how, **options.parts()}
    given |= {"chat": False if options.raw else None, "trace": options.trace is not None}
    if options.watch:
        yield from watch(stream(model, prompts, **given), model, len(prompts))
        return
    ready: dict[int, Result] = {}
    following = 0
    for number, result in as_completed(model, prompts, **given):
        ready[number] = result
        while following in ready:
            yield ready.pop(following)
            following += 1


def settled(options: Answers) -> dict[str, Any]:
    """The given arguments that change an answer, as JSON has them."""
    given = {**options.how, **({"raw": True} if options.raw else {})}
    engine = (*GenerationConfig.fields(MACHINE), "seed", "top_candidates")
    changed = {k: v for k, v in given.items() if k not in engine}
    return dict(json.loads(json.dumps(changed, default=str)))


# -- the model drafts, an autoregressive one verifies: --verifier ---------------------------------


def speculate(prompts: list[Any], options: Answers) -> None:
    """Answers of the verifier on stdout, figures on stderr."""
    options.check_verifier()
    if options.drafter and options.model != "nano":
        raise ConfigError("--model drafts where no --drafter is named: leave one of them out")
    if options.watch or options.trace is not None:
        raise ConfigError("--watch and --trace follow a canvas: leave them out with --verifier")
    for result in _run(prompts, options):
        print(drafted_json(result, options) if options.json else shown(result.text), flush=True)
        if not options.json:
            note(result.footer())


def _run(prompts: list[Any], options: Answers) -> list[SpeculativeResult]:
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
        verifier, drafter, prompts, chat=False if options.raw else None, **parts, **options.how
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


def drafted_json(result: SpeculativeResult, options: Answers) -> str:
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
