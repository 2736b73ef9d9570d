"""From what users pass to requests that are drafted and verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..config import ELSEWHERE, GenerationConfig
from ..errors import ConfigError, UnknownNameError, short
from ..models import DiffusionModel
from ..preparation import Order, RequestMaker, given_of, stop_strings
from ..scheduler import Request
from . import register_all
from .accept.rows import LogitsProcessor
from .base import RULES, AcceptRule, Drafter, single
from .engine import SpeculativeEngine
from .length.control import CONTROLLERS, LengthController
from .naming import fit, load_verifier, make_drafter
from .result import SpeculativeResult
from .rows import SpeculativeRecipe

ARGUMENTS = ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "stop_strings",
             "seed", "max_rows")  # fmt: skip
SETTINGS = ("rule", "controller", "repetition_penalty", "logits_processor")
OTHERS = ("search", "proxy", "window", "steps", "sampler", "cache", "refresh_rounds", "end_marker",
          "marker_position", "trim", "head", "nodes", "exact", "chat", "tokenizer",
          "vocabulary")  # fmt: skip


@dataclass(frozen=True, eq=False)
class SpeculativePreparation(RequestMaker):
    """A drafter, a rule, a length controller and arguments that go together on a verifier."""

    recipe: SpeculativeRecipe
    exact: bool = field(default=True, kw_only=True)

    kind = SpeculativeResult

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
    ) -> SpeculativePreparation:
        register_all()
        given = given_of(config, arguments)
        built = _config(model, given, use_defaults=config is None)
        _check_processors(repetition_penalty, logits_processor)
        judge = single(rule or ("keyed" if built.temperature else "greedy"), RULES, AcceptRule)
        if judge.name == "greedy" and built.temperature:
            raise ConfigError("rule 'greedy' is for temperature 0: use 'keyed' or 'match'")
        recipe = SpeculativeRecipe(
            built, drafter, judge, single(controller or "rate", CONTROLLERS, LengthController),
            model.facts.stop_token_ids, repetition_penalty, tuple(logits_processor), own_defaults,
            stop_strings(model, built) if built.stop_strings else None,
        )  # fmt: skip
        return cls(model, recipe, frozenset(given), exact=exact)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.recipe.stop_ids

    def engine(self, sizes: Sequence[int]) -> SpeculativeEngine:
        drafter = self.recipe.drafter
        return SpeculativeEngine(
            self.model, taps=() if drafter is None else drafter.taps, exact=self.exact,
            max_rows=self.config.max_rows,
        )  # fmt: skip

    def _request(self, index: int, make: Any, positions: int, size: int, traced: bool) -> Request:
        request = super()._request(index, make, positions, size, traced)
        request.at_once = self.recipe.outside
        return request


class Speculation:
    """How a session makes requests of a verifier.  ``drafter``, ``rule``, ``controller``: of
    requests that name none; what a controller learns is shared by all that have the same."""

    def __init__(
        self, model: Any, drafter: Any = None, rule: str | AcceptRule | None = None,
        controller: str | LengthController | None = None, vocabulary: str = "auto",
        exact: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.rule = load_verifier(model), rule
        self.vocabulary, self.exact = vocabulary, exact
        self._drafters: dict[str, Drafter | None] = {}
        self._controllers: dict[str, LengthController] = {}
        self.drafter = self._part(drafter)
        self.controller = self._controller(controller or "rate")

    def _controller(self, controller: str | LengthController) -> LengthController:
        if not isinstance(controller, str):
            return single(controller, CONTROLLERS, LengthController)
        if controller not in self._controllers:
            made = single(controller, CONTROLLERS, LengthController)
            self._controllers[controller] = made
        return self._controllers[controller]

    def _part(self, drafter: Any) -> Drafter | None:
        """A drafter as `speculate` takes it; one per name, so that its texts draft together."""
        if not isinstance(drafter, str):
            return fit(make_drafter(drafter), self.model, self.vocabulary)
        if drafter not in self._drafters:
            self._drafters[drafter] = fit(make_drafter(drafter), self.model, self.vocabulary)
        return self._drafters[drafter]

    def engine(self, **limits: Any) -> SpeculativeEngine:
        """An engine with the drafter's taps."""
        taps = () if self.drafter is None else self.drafter.taps
        return SpeculativeEngine(self.model, taps=taps, exact=self.exact, **limits)

    def request(self, order: Order) -> Request:
        """What ``order`` describes; raises what is wrong with it."""
        for name, given in (("sampler", order.sampler), ("trace", order.trace)):
            if given:
                raise ConfigError(f"{self.model.name} is autoregressive: it has no {name}")
        if order.text is not None:
            raise ConfigError(f"{self.model.name} is autoregressive: it cannot fill holes")
        arguments = dict(order.arguments)
        settings = {name: arguments.pop(name) for name in SETTINGS if name in arguments}
        drafter = self.drafter
        if "drafter" in arguments:
            drafter = self._part(arguments.pop("drafter"))
        settings["rule"] = settings.get("rule") or self.rule
        settings["controller"] = self._controller(settings.get("controller") or self.controller)
        how = SpeculativePreparation.of(self.model, drafter, arguments, order.config, **settings)
        return order.of(how)


def _config(
    model: DiffusionModel, given: Mapping[str, Any], use_defaults: bool
) -> GenerationConfig:
    for name in given:
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


assert set(ARGUMENTS) <= {field.name for field in fields(GenerationConfig)}
