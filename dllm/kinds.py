"""The two kinds of models that a session serves: what fills in masks, and what verifies drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from . import cache as caches
from .errors import ConfigError, UnknownNameError
from .models import DiffusionModel
from .preparation import Diffusion, Order
from .scheduler import Request
from .work import Work

OF_DIFFUSION = ("cache", "sampler", "length", "cuda_graphs", "compile")
OF_VERIFIERS = ("drafter", "rule", "controller", "vocabulary", "exact")


class Kind(Protocol):
    """How a session works with its model."""

    def engine(
        self, *, most: int | None, max_rows: int | None, max_batch_tokens: int | None
    ) -> Work[Any, Any]:
        """What decodes its requests; see `Work`."""

    def request(self, order: Order) -> Request:
        """What ``order`` describes; raises what is wrong with it."""


def kind_of(model: DiffusionModel, how: Mapping[str, Any]) -> Kind:
    """The kind of ``model``: one without a mask token verifies, and so does one that can, where
    ``how``, the session's arguments, names a drafter.  Raises `ConfigError` for arguments of the
    other kind."""
    verifies = model.facts.mask_token_id is None or how.get("drafter") is not None
    known, other = (OF_VERIFIERS, OF_DIFFUSION) if verifies else (OF_DIFFUSION, OF_VERIFIERS)
    for name, value in how.items():
        if name not in (*known, *other):
            raise UnknownNameError("argument of Session", name, known)
        if name in other and value not in (None, False, "none"):
            what = "autoregressive: it has no" if verifies else "no verifier: drop"
            raise ConfigError(f"{model.name} is {what} {name}")
    mine = {name: value for name, value in how.items() if name in known}
    if verifies:
        from .drafting.preparation import Speculation

        return Speculation(model, **mine)
    chosen = caches.compose(mine.pop("cache", "none"), model.family.name)
    return Diffusion(model, chosen, mine.pop("sampler", "threshold"), **mine)
