"""From what users pass to requests that are drafted and verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.config import ELSEWHERE, GenerationConfig
from ..core.declared import VERIFIER
from ..core.errors import ConfigError, UnknownNameError, check_switch, short
from ..models import DiffusionModel
from ..request.preparation import format_for
from ..request.request import Request
from ..request.request_maker import Order, RequestMaker, given_of
from ..request.stopping import stop_strings
from . import register_all
from .accept.rows import LogitsProcessor
from .base import RULES, AcceptRule, Drafter, single
from .engine import SpeculativeEngine
from .length.control import CONTROLLERS, LengthController
from .naming import fit, load_verifier, make_drafter
from .rows import SpeculativeRecipe

ARGUMENTS = GenerationConfig.fields(VERIFIER)
SETTINGS = ("rule", "controller", "repetition_penalty", "logits_processor")
DRAFTING = ("search", "proxy", "window", "steps", "sampler", "cache", "refresh_rounds",
            "recent", "inside", "end_marker", "marker_position", "trim", "head", "nodes",
            "ngram_candidates")  # fmt: skip
OTHERS = (*DRAFTING, "exact", "chat", "tokenizer", "vocabulary")


@dataclass(frozen=True, eq=False)
class SpeculativePreparation(RequestMaker):
    """A drafter, a rule, a length controller and arguments that go together on a verifier.

    ``rule`` as the caller named it.  ``parts`` that requests named, by kind and name: there is one
    of each, so that its texts draft together and share what is learnt.
    """

    recipe: SpeculativeRecipe
    rule: str | AcceptRule | None = field(default=None, kw_only=True)
    exact: bool = field(default=True, kw_only=True)
    vocabulary: str = field(default="auto", kw_only=True)
    parts: dict[tuple[str, str], Any] = field(default_factory=dict, kw_only=True)

    SESSION = ("drafter", "rule", "controller", "vocabulary", "exact")

    @classmethod
    def of(
        cls,
        model: DiffusionModel,
        drafter: Drafter | None,
        arguments: Mapping[str, Any],
        config: GenerationConfig | None = None,
        *,
        rule: str | AcceptRule | None = None,
        controller: str | LengthController | None = None,
        repetition_penalty: float | None = None,
        logits_processor: Sequence[LogitsProcessor] = (),
        own_defaults: bool = True,
        exact: bool = True,
        vocabulary: str = "auto",
    ) -> SpeculativePreparation:
        """See `speculate`; ``drafter`` fits the model."""
        check_switch("exact", exact)
        register_all()
        given = given_of(config, arguments)
        built = _config(model, given, use_defaults=config is None)
        _check_processors(repetition_penalty, logits_processor)
        judge = single(rule or ("keyed" if built.temperature else "greedy"), RULES, AcceptRule)
        if judge.name == "greedy" and built.temperature:
            raise ConfigError("rule 'greedy' is for temperature 0: use 'keyed' or 'match'")
        if judge.lossy and built.formatted:
            raise ConfigError(
                f"rule {judge.name!r} keeps tokens that the verifier would not write, and so "
                f"cannot keep to a form: drop it or {built.formatted}"
            )
        lengths = single(controller or "adaptive", CONTROLLERS, LengthController)
        recipe = SpeculativeRecipe(
            built, drafter, judge, lengths,
            model.facts.stop_token_ids, repetition_penalty, tuple(logits_processor), own_defaults,
            stop_strings(model, built) if built.stop_strings else None, format_for(model, built),
        )  # fmt: skip
        return cls(model, recipe, frozenset(given), rule=rule, exact=exact, vocabulary=vocabulary)

    @classmethod
    def for_session(
        cls, model: DiffusionModel, drafter: Any = None, vocabulary: str = "auto", **how: Any
    ) -> SpeculativePreparation:
        """What the requests of a session have in common."""
        verifier = load_verifier(model)
        part = fit(make_drafter(drafter), verifier, vocabulary)
        return cls.of(verifier, part, {}, vocabulary=vocabulary, **how)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.recipe.stop_ids

    def engine(
        self,
        most: int | None,
        max_batch_size: int,
        max_batch_tokens: int | None,
        whole: bool = False,
    ) -> SpeculativeEngine:
        drafter = self.recipe.drafter
        return SpeculativeEngine(
            self.model, target_layer_ids=() if drafter is None else drafter.target_layer_ids,
            exact=self.exact, most=most, max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
        )  # fmt: skip

    def _request(self, index: int, make: Any, positions: int, size: int, traced: bool) -> Request:
        request = super()._request(index, make, positions, size, traced)
        request.at_once = self.recipe.outside
        return request

    def request(self, order: Order) -> Request:
        for name in ("sampler", "trace"):
            if getattr(order, name):
                raise ConfigError(f"{self.model.name} is autoregressive: it has no {name}")
        if order.text is not None:
            raise ConfigError(f"{self.model.name} is autoregressive: it cannot fill holes")
        arguments = dict(order.arguments)
        own: dict[str, Any] = {"rule": self.rule, "controller": self.recipe.controller}
        own |= {name: arguments.pop(name) for name in SETTINGS if name in arguments}
        drafter = self.recipe.drafter
        if "drafter" in arguments:
            drafter = self._part("drafter", arguments.pop("drafter"))
        own["controller"] = self._part("controller", own["controller"])
        how = SpeculativePreparation.of(self.model, drafter, arguments, order.config, **own)
        (request,) = how.prompts([order.prompt], order.chat, [order.repetition])
        return request

    def _part(self, kind: str, given: Any) -> Any:
        """A part as `speculate` takes it."""
        if isinstance(given, str) and (kind, given) in self.parts:
            return self.parts[kind, given]
        if kind == "drafter":
            made: Any = fit(make_drafter(given), self.model, self.vocabulary)
        else:
            made = single(given, CONTROLLERS, LengthController)
        if isinstance(given, str):
            self.parts[kind, given] = made
        return made


def _config(
    model: DiffusionModel, given: Mapping[str, Any], use_defaults: bool
) -> GenerationConfig:
    for name in given:
        if name in OTHERS:
            owner = "session" if name in ("exact", "vocabulary") else "drafter or model"
            raise ConfigError(f"{name} belongs to the {owner}, not to a request: set it there")
        if name not in ARGUMENTS:
            known = {*ARGUMENTS, *SETTINGS, *OTHERS}
            here = ELSEWHERE.get(name.lower(), "")
            raise UnknownNameError(
                "argument of an autoregressive model", name, known,
                here if here.split(":")[0] in known else None,
            )  # fmt: skip
    defaults = model.generation_defaults if use_defaults else {}
    return GenerationConfig.build({k: v for k, v in defaults.items() if k in ARGUMENTS}, given)


def _check_processors(penalty: Any, processors: Any) -> None:
    if penalty is not None and not (isinstance(penalty, int | float) and penalty > 0):
        raise ConfigError(f"repetition_penalty must be a number above 0, not {short(penalty)}")
    if not isinstance(processors, Sequence) or not all(map(callable, processors)):
        raise ConfigError(
            "logits_processor is a list of callables, as transformers has them, not "
            f"{short(processors)}"
        )
