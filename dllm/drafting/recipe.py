"""How one text is drafted and verified, and requests for such texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.canvas import IntArray
from ..core.config import ELSEWHERE, GenerationConfig, SessionConfig
from ..core.declared import VERIFIER
from ..core.errors import ConfigError, UnknownNameError, short
from ..engine.recipe import Recipe
from ..models import DiffusionModel
from ..request.request import Request
from ..request.requests import format_for, given_of, requests_for
from ..request.stopping import stop_strings
from ..structured.judged import Judged
from . import register_all
from .accept.processors import FormatProcessor, own_processors
from .accept.rows import LogitsProcessor, Sampling
from .base import RULES, AcceptRule, Drafter, single
from .length.control import CONTROLLERS, LengthController
from .naming import fit, load_verifier, make_drafter

ARGUMENTS = GenerationConfig.fields(VERIFIER)
SETTINGS = ("rule", "controller", "repetition_penalty", "logits_processor")
DRAFTING = ("search", "window", "cache", "refresh_rounds", "end_marker", "head", "nodes",
            "ngram_candidates")  # fmt: skip
OTHERS = (*DRAFTING, "exact", "chat", "tokenizer", "vocabulary")


@dataclass(frozen=True, eq=False)
class DraftedRecipe(Recipe):
    """How one text is drafted, verified and ended.

    ``drafter``: None decodes plainly.  ``processors`` act after the checkpoint's own.
    """

    drafter: Drafter | None
    rule: AcceptRule
    controller: LengthController
    repetition_penalty: float | None = field(default=None, kw_only=True)
    processors: tuple[LogitsProcessor, ...] = field(default=(), kw_only=True)

    @property
    def outside(self) -> bool:
        return self.drafter is not None and self.drafter.outside

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Layers of the verifier that the drafter wants to see."""
        return () if self.drafter is None else self.drafter.target_layer_ids

    def sampling(self, model: DiffusionModel, prompt: IntArray, limit: int) -> Sampling:
        """How the verifier's logits become the distribution of a text's tokens."""
        config, penalty, processors = self.config, self.repetition_penalty, self.processors
        given = () if penalty is None else ("repetition_penalty",)
        processors = (*own_processors(model, prompt, limit, given), *processors)
        if self.format is not None:  # last: nothing is to bring back what it takes
            assert not isinstance(self.format, Judged), "`recipe_for` refuses these"
            processors = (*processors, FormatProcessor(self.format, len(prompt), limit))
        return Sampling(
            self.filters, tuple(config.logit_bias.items()), 1.0 if penalty is None else penalty,
            processors, self.stop_ids, len(prompt) + config.min_new_tokens,
        )  # fmt: skip


def recipe_for(
    model: DiffusionModel, drafter: Drafter | None, config: GenerationConfig | None = None,
    arguments: Mapping[str, Any] | None = None, *, rule: str | AcceptRule | None = None,
    controller: str | LengthController | None = None, repetition_penalty: float | None = None,
    logits_processor: Sequence[LogitsProcessor] = (),
) -> DraftedRecipe:  # fmt: skip
    """A fitting drafter, rule, length controller and arguments for the model, see `speculate`."""
    register_all()
    built = _config(model, given_of(config, arguments or {}), use_defaults=config is None)
    _check_processors(repetition_penalty, logits_processor)
    judge = single(rule or ("keyed" if built.temperature else "greedy"), RULES, AcceptRule)
    if judge.name == "greedy" and built.temperature:
        raise ConfigError("rule 'greedy' is for temperature 0: use 'keyed'")
    if judge.lossy and built.formatted:
        raise ConfigError(
            f"rule {judge.name!r} keeps tokens that the verifier would not write, and so "
            f"cannot keep to a structure: drop it or {built.formatted}"
        )
    form = format_for(model, built) if built.formatted else None
    if isinstance(form, Judged):
        raise ConfigError(
            "this structure has no finite automaton, and speculative decoding draws "
            "exactly: use a diffusion model alone, or a simpler structure"
        )
    return DraftedRecipe(
        drafter, judge, single(controller or "adaptive", CONTROLLERS, LengthController),
        config=built, stop_ids=model.facts.stop_token_ids, repetition_penalty=repetition_penalty,
        processors=tuple(logits_processor),
        after_step=stop_strings(model, built) if built.stop_strings else None, format=form,
    )  # fmt: skip


def of_session(model: DiffusionModel, config: SessionConfig) -> DraftedRecipe:
    """What the requests of a session have in common.  Raises where the model cannot verify."""
    drafter = fit(make_drafter(config.drafter), load_verifier(model), config.vocabulary)
    return recipe_for(model, drafter, rule=config.rule, controller=config.controller)


def one_request(
    model: DiffusionModel, own: dict[str, Any], vocabulary: str, prompt: Any, text: Any,
    how: Mapping[str, Any],
) -> Request:  # fmt: skip
    """An answer to ``prompt``, asked of a session.  ``own``: its drafter, rule and controller,
    for requests that name none, and by kind and name those that requests named: there is one of
    each, so that its texts draft together and share what is learnt."""
    given = dict(how)
    for name in ("sampler", "trace"):
        if given.pop(name, None):
            raise ConfigError(f"{model.name} is autoregressive: it has no {name}")
    if text is not None:
        raise ConfigError(f"{model.name} is autoregressive: it cannot fill holes")
    config, chat = given.pop("config", None), given.pop("chat", None)
    repetition = given.pop("repetition", 0)

    def part(kind: str, make: Callable[[Any], Any]) -> Any:
        if kind not in given:
            return own[kind]
        named = given.pop(kind)
        if not isinstance(named, str):
            return make(named)
        if f"{kind} {named}" not in own:
            own[f"{kind} {named}"] = make(named)
        return own[f"{kind} {named}"]

    drafter = part("drafter", lambda named: fit(make_drafter(named), model, vocabulary))
    controller = part("controller", lambda named: single(named, CONTROLLERS, LengthController))
    settings = {"rule": own["rule"], "controller": controller}
    settings |= {name: given.pop(name) for name in SETTINGS if name in given}
    recipe = recipe_for(model, drafter, config, given, **settings)
    return requests_for(model, recipe, [prompt], chat, [repetition])[0]


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
