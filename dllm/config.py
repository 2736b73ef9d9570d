"""Arguments of a generation: one frozen dataclass, validated, keyword-only."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from os import PathLike
from typing import Any, NamedTuple, TypedDict

from .errors import ConfigError, UnknownNameError, check_switch, check_unicode, short

MOST = 2**31 - 1  # of what is counted
MAX_TEMPERATURE = 1e6  # temperature and guidance in float32; all tokens are alike long before
SEEDS = 2**63


class Range(NamedTuple):
    """The numbers that a field takes, ends included."""

    low: float
    high: float
    whole: bool = True
    optional: bool = False


NUMBERS = {
    "max_new_tokens": Range(1, MOST, optional=True),
    "min_new_tokens": Range(0, MOST),
    "steps": Range(1, MOST, optional=True),
    "block_length": Range(1, MOST, optional=True),
    "temperature": Range(0, MAX_TEMPERATURE, whole=False),
    "top_p": Range(0, 1, whole=False),
    "top_k": Range(0, MOST),
    "min_p": Range(0, 1, whole=False),
    "cfg_scale": Range(0, MAX_TEMPERATURE, whole=False),
    "seed": Range(0, SEEDS - 1),
    "max_rows": Range(1, MOST),
    "max_batch_tokens": Range(1, MOST, optional=True),
    "top_candidates": Range(0, MOST),
}
FORMATS = ("regex", "choice", "json_schema")
NOT_WITH_FORMATS = {
    **dict.fromkeys(("top_p", "top_k", "min_p"), "what it leaves may hold no text of the form"),
    "min_new_tokens": "the form says how long the answer is",
    "stop_strings": "they may cut it before its end",
}
SWITCHES = ("cuda_graphs", "compile", "suppress_mask", "literals")

# What other libraries call it, and what to write here.
ELSEWHERE = {
    **dict.fromkeys(("max_tokens", "max_length", "gen_length", "max_completion_tokens"),
                    "max_new_tokens"),
    **dict.fromkeys(("stop", "stop_sequences", "stop_words", "stop_string"), "stop_strings"),
    **dict.fromkeys(("num_steps", "num_inference_steps", "diffusion_steps"), "steps"),
    **dict.fromkeys(("block_size", "blocks"), "block_length"),
    **dict.fromkeys(("guidance_scale", "cfg"), "cfg_scale"),
    **dict.fromkeys(("batch_size", "max_num_seqs"), "max_rows"),
    **dict.fromkeys(("logprobs", "top_logprobs", "n_probs"), "top_candidates"),
    "do_sample": "temperature: 0 is greedy, anything above samples",
    **dict.fromkeys(("stop_token_ids", "eos_token_id", "mask_token_id", "pad_token_id"),
                    "an argument of dllm.load"),
    **dict.fromkeys(("num_return_sequences", "best_of", "num_samples"), "n"),
    "remasking": "sampler='llada(remasking=random)'",
    **dict.fromkeys(("alg", "alg_temp"), "sampler='dream(alg=entropy)'"),
    "threshold": "sampler='threshold(tau=0.9)'",
    **dict.fromkeys(("input_ids", "inputs", "messages"), "prompt"),
    "attention_mask": "prompts without padding: a list of them may differ in length",
    **dict.fromkeys(("output_history", "return_dict_in_generate"), "trace=True"),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"),
                    "logit_bias: tokens of a canvas are decided several at a time, so that there "
                    "is no past to penalise"),
    "use_cache": "cache='dual' or another name of 'dllm caches'",
}  # fmt: skip


class GenerationArguments(TypedDict, total=False):
    """The keyword arguments that end up in a `GenerationConfig`, for type checkers and editors."""

    max_new_tokens: int | None
    min_new_tokens: int
    steps: int | None
    block_length: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    logit_bias: Mapping[int, float]
    cfg_scale: float
    eos_policy: str | None
    stop_strings: str | Iterable[str]
    seed: int
    max_rows: int
    max_batch_tokens: int | None
    top_candidates: int
    cuda_graphs: bool
    compile: bool
    suppress_mask: bool
    constraints: Mapping[int, int | str]
    seed_text: Any
    remask: Iterable[int | tuple[int, int]]
    length: str | None
    regex: str | None
    choice: Iterable[str] | None
    json_schema: Any
    confidence: str | None
    literals: bool


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How to decode.  Names follow transformers where it has one.

    ``max_new_tokens``: positions of the canvas after the prompt; None (default) takes what the
    checkpoint recommends, else 128 or what is left of the context.  On models whose attention is
    causal between blocks, decoded in these, None lets the answer get block after block until it
    ends, which gives the same text.  ``length``: how many of them
    the answer gets is found while it is written, by a rule such as "append" or "daedal" (see
    `dllm.samplers.base.Length`); ``max_new_tokens`` is then the most it may get, None what is left
    of the context.  ``min_new_tokens``: stop ids
    are not proposed among the first that many positions, and no stop string that is complete within
    them ends the text.  ``steps`` and ``block_length`` go to the
    parts of the sampler that have such a field; None leaves their default.  ``temperature`` 0 is
    greedy, and so is anything below 1e-6; ``top_p``, ``top_k`` (0 = off) and ``min_p`` (of the
    largest probability, 0 = off) filter proposals.  ``logit_bias``: token id -> what is added to
    its logit, wherever the answer might have it.
    ``cfg_scale`` > 0: classifier-free guidance, two lanes per row.  ``eos_policy``: what a stop id
    does (see `dllm.samplers.eos`).  ``stop_strings`` end the text where they first appear.
    ``seed``: all random choices are a function of it, the prompt's repetition count, position and
    step.  ``max_rows``: most texts that are decoded at a time (default 32); further ones join as
    others finish.  ``max_batch_tokens``: most token positions fed to the model at once
    (default: 512 on a CPU, where more at once are no faster; else without bound).
    ``top_candidates``: record that many candidates per prediction.  ``cuda_graphs``: pad cached
    steps to a few sizes and replay each as one CUDA graph (on a GPU only).  ``compile``: pass the
    network of such steps through `torch.compile`.  ``suppress_mask=False`` lets the model propose
    [MASK], as most official code does: only for exact reproduction of its probabilities.
    ``constraints`` fixes parts of the answer: offset from its start -> token id, or text whose
    tokens stand from there on; the answer does not end before the last of them.  ``seed_text``: a
    draft that the answer begins as, in place of masks: a text, in which ``[[8]]`` stands for 8 open
    positions, or token ids with -1 for one; of several prompts a list with one each.  ``remask``:
    which tokens of it are open too, as positions from its start or (first, past the last) pairs.
    What is left of the draft is decided, and may be changed by samplers that revise; without
    ``max_new_tokens`` an answer with open positions in its draft is as long as that.  At most one
    of these says which form the answer has: ``regex``, an expression that the whole of it matches;
    ``choice``, the texts it is one of; ``json_schema``, a pydantic class, a schema as a dictionary,
    or a file with one.  How sure the model then is of a token is measured among the answers of this
    form, with ``confidence="model"`` as without it.  ``literals``: text that the form leaves no
    choice about, such as the names of a JSON object, is written without asking the model.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    steps: int | None = None
    block_length: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    cfg_scale: float = 0.0
    eos_policy: str | None = None
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    max_rows: int = 32
    max_batch_tokens: int | None = None
    top_candidates: int = 0
    cuda_graphs: bool = False
    compile: bool = False
    suppress_mask: bool = True
    constraints: Mapping[int, int | str] = field(default_factory=dict)
    seed_text: Any = None
    remask: tuple[tuple[int, int], ...] = ()
    length: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    json_schema: Any = None
    confidence: str | None = None
    literals: bool = False

    def __new__(cls, **given: Any) -> GenerationConfig:
        """Raises `UnknownNameError` for names that are no field."""
        known = {f.name for f in fields(cls)}
        for name in given:
            if name not in known:
                raise UnknownNameError(
                    "generation argument", name, known, ELSEWHERE.get(name.lower())
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, allowed in NUMBERS.items():
            object.__setattr__(self, name, _number(name, getattr(self, name), allowed))
        for name in SWITCHES:
            check_switch(name, getattr(self, name))
        if not self.top_p:
            raise ConfigError("top_p must be above 0: there nothing is left to propose")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}"
            )
        if not isinstance(self.eos_policy, str | None):
            raise ConfigError(f"eos_policy is a name such as 'none', not {short(self.eos_policy)}")
        if not isinstance(self.length, str | None):
            raise ConfigError(
                f"length is a rule such as 'append', or 'fixed', not {short(self.length)}: "
                "how many tokens there may be is max_new_tokens"
            )
        if self.length == "fixed":
            object.__setattr__(self, "length", None)
        object.__setattr__(self, "stop_strings", _texts("stop_strings", self.stop_strings))
        object.__setattr__(self, "constraints", _constraints(self.constraints))
        object.__setattr__(self, "seed_text", _draft(self.seed_text))
        object.__setattr__(self, "remask", _spans(self.remask))
        if self.remask and self.seed_text is None:
            raise ConfigError("remask opens tokens of a draft: pass seed_text, or drop it")
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        self._check_format()

    @property
    def formatted(self) -> str | None:
        """Which argument gives the answer a form, if one does."""
        return next((name for name in FORMATS if getattr(self, name) is not None), None)

    def _check_format(self) -> None:
        """Refuse formats that are none, and what does not go with one."""
        given = [name for name in FORMATS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"an answer has one form: keep {given[0]} or {given[1]}")
        if not isinstance(self.regex, str | None):
            raise ConfigError(f"regex is an expression as a text, not {short(self.regex)}")
        check_unicode(self.regex or "", "regex")
        if not (self.json_schema is None or _is_schema(self.json_schema)):
            raise ConfigError(
                "json_schema is a pydantic class, a dictionary, or a file, not "
                + short(self.json_schema)
            )
        if self.choice is not None:
            choice = () if isinstance(self.choice, str) else _texts("choice", self.choice)
            if not choice:
                raise ConfigError(f"choice is a list of texts, not {short(self.choice)}")
            object.__setattr__(self, "choice", choice)
        if self.confidence not in (None, "model"):
            raise ConfigError(f"confidence is 'model' or left out, not {short(self.confidence)}")
        name = self.formatted
        if name is None:
            for other in ("confidence", "literals"):
                if getattr(self, other):
                    raise ConfigError(f"{other} is about answers with a form: pass one, or drop it")
            return
        for other, why in NOT_WITH_FORMATS.items():
            if getattr(self, other) != getattr(type(self), other):
                raise ConfigError(f"{other} does not go with {name}: {why}; drop one of them")
        if self.eos_policy == "suppress":
            raise ConfigError(f"eos_policy='suppress' does not go with {name}, whose texts end")

    @classmethod
    def build(cls, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> GenerationConfig:
        """``given`` over ``defaults`` (a checkpoint's own), with unknown names refused."""
        known = {f.name for f in fields(cls)}
        merged = {key: value for key, value in defaults.items() if key in known}
        return cls(**{**merged, **given})

    def check_used(
        self, given: Collection[str], *, canvas: int, tempered: bool, traced: bool
    ) -> None:
        """Raise `ConfigError` where something ``given`` would change nothing.

        ``canvas``: positions of the longest answer; ``tempered``: whether samplers see the
        probabilities after temperature and filters; ``traced``: whether there is a trace.
        """
        for name in ("top_p", "top_k", "min_p"):
            plain = getattr(self, name) == getattr(type(self), name) or name not in given
            if not (plain or self.temperature or tempered):
                raise ConfigError(
                    f"{name} has no effect at temperature 0, where the likeliest token is taken: "
                    f"raise temperature or drop {name}"
                )
        if "block_length" in given and self.block_length and self.block_length > canvas:
            raise ConfigError(
                f"block_length={self.block_length} exceeds the canvas of {canvas}: blocks have at "
                f"most {canvas} positions, or raise max_new_tokens"
            )
        if "top_candidates" in given and self.top_candidates and not traced:
            raise ConfigError(
                "top_candidates are written to the trace: ask for a trace, or drop them"
            )

    @property
    def sampler_options(self) -> dict[str, Any]:
        """What goes to the parts of the sampler."""
        names = ("steps", "block_length", "eos_policy")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def _is_schema(value: Any) -> bool:
    """Whether it may say what a JSON text looks like."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) for key in value)
    if isinstance(value, str):
        check_unicode(value, "json_schema")
    return isinstance(value, str | PathLike) or (
        isinstance(value, type) and hasattr(value, "model_json_schema")
    )


def _number(name: str, value: Any, allowed: Range) -> Any:
    """``value`` as a Python number, or `ConfigError`."""
    if value is None and allowed.optional:
        return None
    kind = "a whole number" if allowed.whole else "a number"
    if isinstance(value, bool) or not isinstance(value, Integral if allowed.whole else Real):
        raise ConfigError(f"{name} must be {kind}, not {short(value)}")
    number: Any = value
    if not isinstance(value, Integral) and not math.isfinite(number):
        raise ConfigError(f"{name} must be finite, not {value}")
    if number < allowed.low:
        raise ConfigError(f"{name} must be at least {allowed.low}, not {short(value)}")
    if number > allowed.high:
        raise ConfigError(f"{name} must be at most {allowed.high:g}, not {short(value)}")
    return int(number) if allowed.whole else float(number)


def _draft(value: Any) -> Any:
    """A text, ids, or several of either; arrays as lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str):
        check_unicode(value, "seed_text")
    elif not isinstance(value, list | tuple | None) or value in ([], ()):
        raise ConfigError(f"seed_text is a draft, a text or token ids, not {short(value)}")
    return value


def _spans(value: Any) -> tuple[tuple[int, int], ...]:
    """Positions and (first, past the last) pairs, all as pairs."""
    kinds = "remask is a list of positions and (first, past the last) pairs"
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ConfigError(f"{kinds}, not {short(value)}")
    spans = []
    for item in value:
        pair = (item, item + 1) if isinstance(item, Integral) else item
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise ConfigError(f"{kinds}, not a list with {short(item)}")
        low, high = (_number("a position to remask", at, Range(0, MOST)) for at in pair)
        if low >= high:
            raise ConfigError(f"{kinds}, the first before the last, not {short(item)}")
        spans.append((low, high))
    return tuple(spans)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """One text or several, as a tuple."""
    texts = (value,) if isinstance(value, str) else value
    if isinstance(texts, Mapping | bytes) or not isinstance(texts, Iterable):
        raise ConfigError(f"{name} is a text or a list of texts, not {short(value)}")
    texts = tuple(texts)
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError(f"{name} is a text or a list of texts, not one with {short(text)}")
        if not text:
            raise ConfigError(f"{name} must not be empty strings")
        check_unicode(text, name)
    return texts


def _bias(value: Any) -> dict[int, float]:
    """Ids of tokens and what is added to their logits."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"logit_bias maps token ids to numbers, not {short(value)}")
    whole, number = Range(0, MOST), Range(-MAX_TEMPERATURE, MAX_TEMPERATURE, whole=False)
    return {
        _number("an id of logit_bias", token, whole): _number(f"logit_bias[{token}]", bias, number)
        for token, bias in value.items()
    }


def _constraints(value: Any) -> dict[int, int | str]:
    """Offsets in the answer and what stands there."""
    shape = "constraints map offsets in the answer (0 is its first token) to a token id or a text"
    if not isinstance(value, Mapping):
        raise ConfigError(f"{shape}, e.g. {{0: 'The'}}, not {short(value)}")
    result: dict[int, int | str] = {}
    for offset, wanted in value.items():
        numbers: list[Any] = [x for x in (offset, wanted) if isinstance(x, Integral)]
        if (
            not isinstance(offset, Integral)
            or not isinstance(wanted, Integral | str)
            or any(isinstance(x, bool) for x in numbers)
            or any(not 0 <= x <= MOST for x in numbers)
            or wanted == ""
        ):
            raise ConfigError(f"{shape}, not {short(offset)} to {short(wanted)}")
        if isinstance(wanted, str):
            check_unicode(wanted, f"constraints[{offset}]")
        result[int(offset)] = wanted if isinstance(wanted, str) else int(wanted)
    return result
