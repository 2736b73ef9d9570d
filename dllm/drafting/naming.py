"""From what users name to a verifier and a `Drafter`."""

from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..core.errors import ConfigError, UnknownNameError, short
from ..models import DiffusionModel, load
from ..models.checkpoint import BUNDLED
from ..models.loader import remembered
from . import register_all
from .base import DRAFTERS, Drafter, single
from .verifiers.base import can_verify

DrafterLike = Any  # None, Drafter, model, hub id, folder, spec, or a list of these
INNER = ("model", "banned", "known_as")  # fields of drafters that are no options
VerifierLike = str | PreTrainedModel | DiffusionModel


def load_verifier(verifier: VerifierLike, tokenizer: Any = None) -> DiffusionModel:
    """The verifier, loaded.  Raises `ConfigError` when it is a diffusion model."""
    model = load(verifier, tokenizer=tokenizer) if tokenizer is not None else remembered(verifier)
    if not can_verify(model):
        raise ConfigError(
            f"{model.name} is a diffusion model: it drafts, but cannot verify; "
            "pass an autoregressive model as the verifier"
        )
    return model


def make_drafter(drafter: DrafterLike, **options: Any) -> Drafter | None:
    """A `Drafter` from whatever `speculate` takes; ``options`` are those of diffusion drafters."""
    from .dflash.checkpoint import is_block_drafter
    from .dflash.drafter import BlockDrafter
    from .drafters.diffusion import DiffusionDrafter
    from .drafters.several import FirstOf

    register_all()
    if isinstance(drafter, list | tuple):
        models = [one for one in drafter if _names_model(one)]
        parts = [make_drafter(one, **(options if _names_model(one) else {})) for one in drafter]
        if options and not models:
            raise ConfigError(f"{next(iter(options))} is for diffusion drafters: name one")
        return FirstOf(tuple(part for part in parts if part is not None))
    if options and not _names_model(drafter):
        raise ConfigError(
            f"{next(iter(options))} is for diffusion drafters named by model: leave it out, or set "
            "it on the DiffusionDrafter"
        )
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    if isinstance(drafter, str) and is_drafter_spec(drafter):
        return single(drafter, DRAFTERS, Drafter)
    block = is_block_drafter(drafter)
    kind: type[Drafter] = BlockDrafter if block else DiffusionDrafter
    takes = [field.name for field in fields(kind)]
    odd = next((name for name in options if name not in takes), None)
    if odd is not None:
        kinds = ("diffusion models", "block drafters")
        raise ConfigError(
            f"{odd} is for {kinds[not block]}: {short(drafter)} is one of the {kinds[block]}, "
            f"which take {', '.join(name for name in takes if name not in INNER)}"
        )
    return kind(drafter if block else remembered(drafter), **options)  # type: ignore[call-arg]


def _names_model(drafter: DrafterLike) -> bool:
    """Whether a single drafter is given as a diffusion model or its name."""
    if isinstance(drafter, str):
        return not is_drafter_spec(drafter)
    return drafter is not None and not isinstance(drafter, Drafter)


def check_vocabulary(policy: object) -> None:
    """Raise `ConfigError` for what `fit` does not know."""
    if policy not in ("auto", "retokenize"):
        raise ConfigError(f"vocabulary is 'auto' or 'retokenize', not {policy!r}")


def fit(drafter: Drafter | None, verifier: DiffusionModel, vocabulary: str) -> Drafter | None:
    """``drafter`` with every diffusion model in it made fit for the verifier's token ids."""
    from .drafters.diffusion import DiffusionDrafter
    from .vocabulary import reconcile

    check_vocabulary(vocabulary)
    if isinstance(drafter, DiffusionDrafter):
        return reconcile(drafter, drafter.model, verifier, vocabulary)
    inner = getattr(drafter, "drafters", None)
    if drafter is None or inner is None:
        return drafter
    fitted = tuple(fit(one, verifier, vocabulary) for one in inner)
    return replace(drafter, drafters=fitted)  # type: ignore[call-arg]


def is_drafter_spec(name: str) -> bool:
    """Whether ``name`` is the spec of a registered drafter, not the name of a model.

    Raises `UnknownNameError` for what is neither, but nearly the name of a drafter.
    """
    register_all()
    start = name.split("(")[0].strip()
    if start in DRAFTERS or start in BUNDLED or "/" in start or Path(start).exists():
        return start in DRAFTERS
    if get_close_matches(start, list(DRAFTERS), cutoff=0.75):
        raise UnknownNameError("drafter", start, DRAFTERS)
    return False
