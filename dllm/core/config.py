"""The parameters of decoding, each declared once: `GenerationConfig`."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from os import PathLike
from typing import Annotated, Any, Self, TypedDict

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from .declared import ANSWER, HOLES, MACHINE, VERIFIER, Declared, Numeric, Whole, about, listed
from .errors import ConfigError, check_unicode, short

MOST = 2**31 - 1  # of what is counted
MAX_TEMPERATURE = 1e6  # temperature and guidance in float32; all tokens are alike long before
FILTERS = ("top_p", "top_k", "min_p")  # of what is drawn from
FORMATS = ("regex", "choice", "json_schema", "grammar", "structural_tag")
# What other libraries call it, and what to write here.
ELSEWHERE = {
    **dict.fromkeys(("max_tokens", "max_length", "gen_length", "max_completion_tokens"),
                    "max_new_tokens"),
    **dict.fromkeys(("stop", "stop_sequences", "stop_words", "stop_string",
                     "stopping_criteria"), "stop_strings"),
    **dict.fromkeys(("num_steps", "num_inference_steps", "diffusion_steps"), "steps"),
    **dict.fromkeys(("block_size", "blocks"), "block_length"),
    **dict.fromkeys(("guidance_scale", "cfg"), "cfg_scale"),
    **dict.fromkeys(("batch_size", "max_num_seqs"), "max_batch_size"),
    **dict.fromkeys(("logprobs", "top_logprobs", "n_probs", "output_scores", "return_logprobs"),
                    "result.logprobs; top_candidates with trace=True for other tokens"),
    "do_sample": "temperature: 0 is greedy, anything above samples",
    **dict.fromkeys(("stop_token_ids", "eos_token_id", "mask_token_id", "pad_token_id", "device",
                     "dtype", "quantization", "tokenizer"), "an argument of dllm.load"),
    **dict.fromkeys(("assistant_model", "draft_model", "drafter"),
                    "dllm.speculate(model, drafter, prompt)"),
    **{f"guided_{name}": name for name in ("regex", "choice", "grammar")},
    "guided_json": "json_schema", "response_format": "json_schema", "generation_config": "config",
    **dict.fromkeys(("num_return_sequences", "best_of", "num_samples"), "n"),
    "remasking": "sampler='llada(remasking=random)'", "threshold": "sampler='threshold(tau=0.9)'",
    **dict.fromkeys(("alg", "alg_temp"), "sampler='dream(alg=entropy)'"),
    **dict.fromkeys(("input_ids", "inputs", "messages"), "prompt"),
    "attention_mask": "prompts without padding: a list of them may differ in length",
    **dict.fromkeys(("output_history", "return_dict_in_generate"), "trace=True"),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"),
                    "logit_bias: tokens of a canvas are decided several at a time, so that there "
                    "is no past to penalise"),
    "generator": "seed", "random_seed": "seed", "observe": "an argument of dllm.Session",
    "progress": "a loop over dllm.as_completed, or dllm generate on the command line",
    "use_cache": "cache='dual' or another name of 'dllm caches'",
}  # fmt: skip

Number = Annotated[int, Field(ge=0, le=MOST), Whole]
Count = Annotated[int, Field(ge=1, le=MOST), Whole]
Share = Annotated[float, Field(ge=0, le=1), Numeric]
Scale = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE), Numeric]
Bias = Annotated[float, Field(ge=-MAX_TEMPERATURE, le=MAX_TEMPERATURE), Numeric]
EVERY = ANSWER, HOLES, VERIFIER


def _texts(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    """One text or several, as a tuple."""
    name, texts = info.field_name or "", (value,) if isinstance(value, str) else listed(value)
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


def _choice(value: Any, info: ValidationInfo) -> tuple[str, ...] | None:
    choice = () if isinstance(value, str) else value if value is None else _texts(value, info)
    if choice == ():
        raise ConfigError(f"choice is a list of texts, not {short(value)}")
    return choice


def _unicode(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        check_unicode(value, info.field_name or "")
    return value


def _schema(value: Any, info: ValidationInfo) -> Any:
    """What may say what a JSON text looks like."""
    _unicode(value, info)
    if isinstance(value, str | PathLike | None) or hasattr(value, "model_json_schema"):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(
            f"json_schema is a pydantic class, a dictionary, or a file, not {short(value)}"
        )
    return value


def _draft(value: Any) -> Any:
    """A text, ids, or several of either; arrays as lists."""
    value = listed(value)
    if isinstance(value, str):
        check_unicode(value, "initial_text")
    elif not isinstance(value, list | tuple | None) or value in ([], ()):
        raise ConfigError(f"initial_text is a text or token ids, not {short(value)}")
    return value


def _spans(value: Any) -> tuple[tuple[int, int], ...]:
    """Positions and (first, past the last) pairs, all as pairs."""
    kinds, value = "remask is a list of positions and (first, past the last) pairs", listed(value)
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ConfigError(f"{kinds}, not {short(value)}")
    spans = []
    for item in value:
        pair = (item, item + 1) if isinstance(item, Integral) else item
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise ConfigError(f"{kinds}, not a list with {short(item)}")
        for at in pair:
            if not isinstance(at, Integral) or isinstance(at, bool):
                raise ConfigError(f"a position to remask must be a whole number, not {short(at)}")
            if not 0 <= int(at) <= MOST:
                bound = f"at most {MOST}" if int(at) > 0 else "at least 0"
                raise ConfigError(f"a position to remask must be {bound}, not {short(at)}")
        low, high = map(int, pair)
        if low >= high:
            raise ConfigError(f"{kinds}, the first before the last, not {short(item)}")
        spans.append((low, high))
    return tuple(spans)


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


class Machine(Declared):
    """How an engine works: what it holds at once, what a forward takes.  No text depends on it."""

    max_batch_size: Annotated[Count, about(
        "Sequences decoded at a time.  Further ones join as others finish.", MACHINE, VERIFIER,
        wire=None,
    )] = 32  # fmt: skip
    max_batch_tokens: Annotated[Count | None, about(
        "Token positions per forward pass.  Default: 512 on a CPU, else no limit.", MACHINE,
        VERIFIER, wire=None,
    )] = None  # fmt: skip
    cuda_graphs: Annotated[bool, about(
        "Replay steps of up to 2,048 positions as CUDA graphs.  They are padded to a few sizes.",
        MACHINE, wire=None,
    )] = False  # fmt: skip


class GenerationConfig(Machine):
    """How to decode.  Names follow transformers where it has one.  None leaves what the checkpoint
    recommends, or the part's own default.  ``model_fields_set``: what the caller named."""

    KIND = "generation argument"
    ELSEWHERE = ELSEWHERE

    max_new_tokens: Annotated[Count | None, about(
        "Maximum length of the answer in tokens.  Default: what the checkpoint recommends, else "
        "128 or what is left of the context; blocks until it ends on models whose attention is "
        "causal between blocks.  With ``length`` the most that an answer may get.",
        ANSWER, VERIFIER, wire="max_tokens",
    )] = None  # fmt: skip
    min_new_tokens: Annotated[Number, about(
        "Minimum length of the answer in tokens.  Stop ids are not proposed among the first that "
        "many positions, and no stop string that is complete within them ends the text.",
        ANSWER, VERIFIER, wire="min_tokens",
    )] = 0  # fmt: skip
    steps: Annotated[
        Count | None, about("Denoising steps, for samplers with a fixed schedule (llada, dream).")
    ] = None
    block_length: Annotated[
        Count | None, about("Tokens per block.  Blocks are decoded left to right.")
    ] = None
    temperature: Annotated[Scale, about("Sampling temperature (0: greedy).", *EVERY)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1), Numeric, about(
        "Sample from the smallest set of tokens with this total probability (1: all).", *EVERY,
    )] = 1.0  # fmt: skip
    top_k: Annotated[Number, about("Sample from the k most probable tokens (0: all).", *EVERY)] = 0
    min_p: Annotated[Share, about(
        "Drop tokens below this fraction of the best token's probability (0: none).", *EVERY,
    )] = 0.0  # fmt: skip
    logit_bias: Annotated[Mapping[Number, Bias], about(
        "Token id and the number added to its logit, at every position.", *EVERY,
        kind="a mapping of token ids to numbers",
    )] = Field(default_factory=dict)  # fmt: skip
    cfg_scale: Annotated[Scale, about(
        "Scale of classifier-free guidance (0: off).  Each sequence is then fed twice.",
    )] = 0.0  # fmt: skip
    eos_policy: Annotated[str | None, about(
        "How an EOS token ends the answer: prefix_complete, none, block_contains, block_all, "
        "first_commit, first_commit_cut, last_block, suppress or rank_last.  "
        "See `dllm.samplers.eos`.", ANSWER, kind="a name such as 'none'",
    )] = None  # fmt: skip
    stop_strings: Annotated[tuple[str, ...], BeforeValidator(_texts), about(
        "Text that ends the answer where it first appears.", *EVERY, wire="stop",
        flag="stop",
    )] = ()  # fmt: skip
    seed: Annotated[int, Field(ge=0, le=2**63 - 1), Whole, about(
        "Random seed.  Random choices are a function of it, the prompt's repetition count, "
        "position and step.", *EVERY,
    )] = 0  # fmt: skip
    top_candidates: Annotated[Number, about("Candidates per position in the trace.", wire=None)] = 0
    cache_salt: Annotated[str | None, about(
        "Kept prefixes are shared among texts with the same one.", *EVERY,
        kind="a text", wire=None, flag="",
    )] = None  # fmt: skip
    suppress_mask: Annotated[bool, about(
        "False lets the model propose [MASK].  Most official code does: only for exact "
        "reproduction of its probabilities.", wire=None, flag="",
    )] = True  # fmt: skip
    constraints: Annotated[Mapping[int, int | str], BeforeValidator(_constraints), about(
        "Text fixed at an offset: OFFSET=TEXT, in tokens of the answer.  A mapping of offsets to "
        "token ids or texts.  The answer does not end before the last of them.",
        ANSWER, flag="constraint",
    )] = Field(default_factory=dict)  # fmt: skip
    initial_text: Annotated[Any, BeforeValidator(_draft), about(
        "Text that decoding starts from; [[8]] in it stands for 8 masked tokens.  A text, or ids "
        "with -1; of several prompts a list with one each.", ANSWER,
    )] = None  # fmt: skip
    remask: Annotated[tuple[tuple[int, int], ...], BeforeValidator(_spans), about(
        "Positions of the initial text to generate again, e.g. 0,4..9.  Positions and (first, past "
        "the last) pairs.", ANSWER,
    )] = ()  # fmt: skip
    length: Annotated[str | None, BeforeValidator(lambda v: None if v == "fixed" else v), about(
        "How the length of the answer is found: append, daedal, dreamon or fixed (default).  On "
        "block-causal models append is the default where no ``max_new_tokens`` is given.",
        kind="a rule such as 'append', or 'fixed'",
    )] = None  # fmt: skip
    regex: Annotated[str | None, BeforeValidator(_unicode), about(
        "Regular expression that the whole answer matches.", *EVERY, kind="an expression as a text",
        wire=None,
    )] = None  # fmt: skip
    choice: Annotated[tuple[str, ...] | None, BeforeValidator(_choice), about(
        "An allowed answer.", *EVERY, wire=None,
    )] = None  # fmt: skip
    json_schema: Annotated[Any, BeforeValidator(_schema), about(
        "File of the answer's JSON schema.  Or a pydantic class, or a dictionary.", *EVERY,
        wire=None,
    )] = None  # fmt: skip
    grammar: Annotated[str | None, BeforeValidator(_unicode), about(
        "Grammar of the answer.  In the syntax of Lark, or of GBNF.", *EVERY,
        kind="a grammar as a text", wire=None,
    )] = None  # fmt: skip
    structural_tag: Annotated[Mapping[str, Any] | None, about(
        "Structures within free text.  A dictionary of triggers and structures, as in vLLM and "
        "SGLang.", *EVERY, kind="a dictionary with structures and triggers", wire=None,
    )] = None  # fmt: skip
    confidence: Annotated[str | None, about(
        "With structured output: 'model' uses the unconstrained probability as confidence.",
        kind="'model' or left out", wire=None,
    )] = None  # fmt: skip
    literals: Annotated[
        bool, about("Insert text that the schema fixes without a forward pass.", wire=None)
    ] = False
    extra_keys: Annotated[
        bool, about("Allow undeclared keys and any order of keys in JSON objects.", wire=None)
    ] = False

    @model_validator(mode="after")
    def _together(self) -> Self:
        """What does not go together."""
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}"
            )
        if self.remask and self.initial_text is None:
            raise ConfigError("remask opens tokens of a text: pass initial_text, or drop it")
        if self.confidence not in (None, "model"):
            raise ConfigError(f"confidence is 'model' or left out, not {short(self.confidence)}")
        if self.extra_keys and self.json_schema is None:
            raise ConfigError("extra_keys is about objects of a json_schema: pass one, or drop it")
        given = [name for name in FORMATS if getattr(self, name) is not None]
        if not given:
            for other in ("confidence", "literals"):
                if getattr(self, other):
                    raise ConfigError(
                        f"{other} is about structured output: pass one of {', '.join(FORMATS)}, or "
                        f"drop {other}"
                    )
            return self
        if len(given) > 1:
            raise ConfigError(f"an answer has one structure: keep {given[0]} or {given[1]}")
        if self.min_new_tokens:
            raise ConfigError(
                "min_new_tokens does not go with a structure, which says how long the answer is"
            )
        if self.eos_policy == "suppress":
            raise ConfigError("eos_policy='suppress' does not go with a structure, whose texts end")
        return self

    @property
    def formatted(self) -> str | None:
        """Which argument gives the answer a form, if one does."""
        return next((name for name in FORMATS if getattr(self, name) is not None), None)

    @classmethod
    def build(cls, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Self:
        """``given`` over ``defaults`` (a checkpoint's own), with unknown names refused."""
        known = {key: value for key, value in defaults.items() if key in cls.model_fields}
        made = cls(**{**known, **given})
        made.model_fields_set.clear()  # of the caller alone
        made.model_fields_set.update(given)
        return made

    def check_used(self, *, canvas: int, tempered: bool, traced: bool) -> None:
        """Raise `ConfigError` where something that the caller named would change nothing.

        ``canvas``: positions of the longest answer; ``tempered``: whether samplers see the
        probabilities after temperature and filters; ``traced``: whether there is a trace.
        """
        given, fields = self.model_fields_set, GenerationConfig.model_fields
        for name in FILTERS:
            plain = name not in given or getattr(self, name) == fields[name].default
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


class GenerationArguments(TypedDict, total=False):
    """The keyword arguments that end up in a `GenerationConfig`, for type checkers and editors."""

    max_batch_size: int
    max_batch_tokens: int | None
    cuda_graphs: bool
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
    top_candidates: int
    cache_salt: str | None
    suppress_mask: bool
    constraints: Mapping[int, int | str]
    initial_text: Any
    remask: Iterable[int | tuple[int, int]]
    length: str | None
    regex: str | None
    choice: Iterable[str] | None
    json_schema: Any
    grammar: str | None
    structural_tag: Mapping[str, Any] | None
    confidence: str | None
    literals: bool
    extra_keys: bool


class Serving(Machine):
    """What a session and a server are told alike."""

    KIND = "argument of a session"

    sampler: Annotated[Any, about("Sampler of requests that name none, default threshold.")] = None
    length: Annotated[str | None, about(
        "How the length of answers is found where a request does not say (default fixed).  "
        "``max_new_tokens`` is then the most.")] = None  # fmt: skip
    max_batch_size: Annotated[Count, about("Sequences decoded at a time.", *EVERY)] = 16
    max_waiting: Annotated[
        Number | None, about("Requests in the queue; more are rejected.", *EVERY)
    ] = None
    max_positions: Annotated[Count | None, about(
        "Size of the key-value cache in tokens, of all sequences.  Default: ``max_batch_size`` "
        "times the context; memory is taken as it is needed.", *EVERY)] = None  # fmt: skip
    prefix_cache_tokens: Annotated[Number | None, about(
        "Size of the prefix cache in tokens (default 16384; 0: off).  For verifiers, and with the "
        "caches block and wedlm.", *EVERY)] = None  # fmt: skip


class SessionConfig(Serving):
    """How a `Session` works."""

    cache: Annotated[Any, about("Cache of a diffusion model.")] = "none"
    drafter: Annotated[Any, about("Drafter of a verifier, see `dllm.speculate`.", VERIFIER)] = None
    rule: Annotated[Any, about("How a verifier accepts drafts.", VERIFIER)] = None
    controller: Annotated[Any, about("Controller of the length of drafts.", VERIFIER)] = None
    vocabulary: Annotated[str, about("As for `dllm.speculate`.", VERIFIER)] = "auto"
    exact: Annotated[bool, about("As for `dllm.speculate`.", VERIFIER)] = True


class SessionArguments(TypedDict, total=False):
    """The keyword arguments of a `Session`, for type checkers and editors."""

    max_batch_size: int
    max_batch_tokens: int | None
    cuda_graphs: bool
    sampler: Any
    length: str | None
    max_waiting: int | None
    max_positions: int | None
    prefix_cache_tokens: int | None
    cache: Any
    drafter: Any
    rule: Any
    controller: Any
    vocabulary: str
    exact: bool
