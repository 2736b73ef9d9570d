"""Options that commands share, each declared once.

A group of options is a frozen dataclass, whose fields are made by `option`.  Parameters of
decoding are not listed here: a group names which it `PARAMETERS` has, and they are as
`dllm.GenerationConfig` declares them.  `takes` gives a command all of these as options and the
command a filled instance as ``options``.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo
from typer.models import OptionInfo

from ..core.config import GenerationConfig
from ..core.declared import HOLES, MACHINE, VERIFIER, Declared, about_of
from ..core.errors import ConfigError
from .output import remember_debug, waiting

if TYPE_CHECKING:
    from ..models import DiffusionModel

MODEL, DECODING, DRAFTING, OUTPUT = "Model", "Decoding", "Drafting", "Output"
MEASURING = "Measuring"
SAMPLER, CACHE = "threshold", "none"
OPTION = "option"  # key in the metadata of a field
LETTERS = {"cache": "-c", "caches": "-c", "examples": "-n", "file": "-f", "model": "-m",
           "output": "-o", "sampler": "-s", "tasks": "-t", "watch": "-w"}  # fmt: skip


@dataclass(frozen=True)
class Opt:
    """An option under a heading of the help page.  It is called as its field, or by the names that
    are given; `LETTERS` are the same everywhere."""

    text: str
    panel: str | None
    names: tuple[str, ...]
    more: Mapping[str, Any]

    def typer(self, field: str) -> Any:
        """The option of ``field``, as typer wants it."""
        names = [*(self.names or [f"--{field.replace('_', '-')}"])]
        names += [LETTERS[field]] if field in LETTERS else []
        return typer.Option(*names, rich_help_panel=self.panel, help=self.text,
                            **{"show_default": False, **self.more})  # fmt: skip


def option(default: Any, text: str, panel: str | None, *names: str, **more: Any) -> Any:
    """A field of a group that is an option; ``...`` for a default: it must be given."""
    about = {OPTION: Opt(text, panel, names, more)}
    return field(metadata=about) if default is ... else field(default=default, metadata=about)


Prompt = Annotated[
    str | None, typer.Argument(help="The prompt; '-' or nothing reads standard input.")
]
RAW = partial(option, False, "Use the prompt as it is, without the chat template.", DECODING)
JSON = partial(option, False, "Print a JSON object per answer.", OUTPUT)
TRACE = partial(option, None, "Write every step to this file: .json, or .html to view.", OUTPUT)
_keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)


def everywhere(command: Callable[..., None], shown: Collection[str] = ()) -> Callable[..., None]:
    """The command with ``--threads`` and ``--debug``.  Where options are named that its help shows,
    ``--help-all`` shows the others as well."""
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    extra = {
        "threads": (int | None, Opt("CPU threads (default: chosen by a short timing).", MODEL, (),
                                    {"min": 1})),
        "debug": (bool, Opt("Show tracebacks of errors.", OUTPUT, (),
                            {"callback": remember_debug})),
        "help_all": (bool, Opt("Show all options.", None, (),
                               {"callback": _help_all, "is_eager": True})),
    }  # fmt: skip
    if not shown:
        del extra["help_all"]

    @wraps(command)
    def run(**values: Any) -> None:
        if values["threads"] is not None:
            from ..models.threads import set_threads

            set_threads(values["threads"])
        command(**{name: value for name, value in values.items() if name not in extra})

    parameters = [parameter.replace(annotation=hints.get(name, parameter.annotation))
                  for name, parameter in signature.parameters.items()]  # fmt: skip
    parameters += [
        _keyword(name, default=None, annotation=Annotated[kind, told.typer(name)])
        for name, (kind, told) in extra.items()
    ]
    for parameter in parameters:
        for one in getattr(parameter.annotation, "__metadata__", ()):
            if shown and isinstance(one, OptionInfo):
                one.hidden = parameter.name not in {*shown, "help_all"}
    return _shown(run, parameters)


def _help_all(ctx: typer.Context, value: bool) -> None:
    """Callback of ``--help-all``."""
    if not value:
        return
    hidden = [one for one in ctx.command.params if getattr(one, "hidden", False)]
    for one in hidden:
        vars(one)["hidden"] = False
    try:
        print(ctx.get_help())
    finally:
        for one in hidden:
            vars(one)["hidden"] = True
    raise typer.Exit


def _shown(run: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """``run``, which typer takes for a function of ``parameters``."""
    vars(run).pop("__wrapped__")  # its signature is not ours
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a model is loaded, and where."""

    dtype: str = option(
        "auto", "Data type of the weights: auto (default), float32, bfloat16 or float16.", MODEL
    )
    device: str = option("auto", "Device: cpu, cuda, ... (default: cuda if available).", MODEL)
    quantization: str | None = option(None, "Quantise the weights: int8 or int4 (CPU).", MODEL)
    tokenizer: str | None = option(
        None, "Tokenizer folder or hub id (default: the model's, or --verifier's).", MODEL
    )
    adapter: str | None = option(
        None, "Folder of a LoRA adapter for the model (or --verifier).", MODEL
    )

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `dllm.load`; weights of few bits are for a CPU."""
        given = {one.name: getattr(self, one.name) for one in fields(Loading)}
        if self.quantization and self.device == "auto":
            given["device"] = "cpu"
        return {name: value for name, value in given.items() if value is not None}

    def load_model(self, name: str, **other: Any) -> "DiffusionModel":
        """The model called ``name`` on its device; ``other`` arguments of `dllm.load` win."""
        from ..models import load

        with waiting(f"loading {name}"):
            return load(name, **{**self.loading, **other})


@dataclass(frozen=True, kw_only=True)
class Loaded(Loading):
    """Which model, and where."""

    model: str = option("nano", "Model: hub id, folder, or nano (default).", MODEL)

    def load(self) -> "DiffusionModel":
        return self.load_model(self.model)


@dataclass(frozen=True, kw_only=True)
class Ways(Loaded):
    """Several ways of decoding: every sampler with every cache."""

    sampler: list[str] | None = option(
        None, "Samplers to run; repeatable; {a,b} stands for several values.", DECODING
    )
    cache: list[str] | None = option(None, "Caches to run; repeatable (default none).", DECODING)
    PARAMETERS: ClassVar[tuple[str, ...]] = ("max_new_tokens", "block_length")
    how: Mapping[str, Any] = field(default_factory=dict)

    def given(self, *names: str) -> dict[str, Any]:
        """Those of the fields and parameters that were given."""
        values = {name: self.how.get(name, getattr(self, name, None)) for name in names}
        return {name: value for name, value in values.items() if value is not None}


EVERY = GenerationConfig.fields().keys() - {
    "suppress_mask", "top_candidates", "cache_salt", "structural_tag",
}  # fmt: skip
ANSWERS = GenerationConfig.fields().keys() - GenerationConfig.fields(HOLES, MACHINE) | {
    "stop_strings", "logit_bias", "length"
}  # fmt: skip
# Written as text: how often the option may stand there, and how it is read.
TEXTS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "stop_strings": (list[str], tuple),
    "choice": (list[str], tuple),
    "constraints": (list[str], lambda texts: _each("--constraint", map(_constraint, texts))),
    "logit_bias": (list[str], lambda texts: _each("--logit-bias", map(_bias, texts))),
    "remask": (str, lambda text: tuple(map(_span, text.split(",")))),
    "initial_text": (str, str),
    "json_schema": (str, str),
    "caches": (list[str], tuple),
    "drafters": (list[str], tuple),
    "sampler": (str, str),
    "cors": (list[str], tuple),
}
PANELS = {
    "top_candidates": OUTPUT,
    **dict.fromkeys(("name", "page", "tool_parser", "cors"), "Network"),
    **dict.fromkeys(
        ("max_waiting", "deadline", "drain", "max_body", "max_prompt_tokens"), "Limits"
    ),
}


def parameter(name: str, declared: FieldInfo) -> tuple[str, Any]:
    """What the option of a declared field is called, and its type for typer."""
    about = about_of(declared)
    kind = TEXTS[name][0] if name in TEXTS else _plain(declared.annotation)
    default = declared.get_default(call_default_factory=True)
    help = about.says.partition(".  ")[0].rstrip(".")
    help += "; repeatable" * (get_origin(kind) is list)
    if isinstance(default, int | float) and not isinstance(default, bool):
        help += f", default {default:,g}" if default < 1e6 else ""
    flag = about.flag or name
    long = f"--{flag.replace('_', '-')}"
    if default is True:
        long += f"/--no-{long[2:]}"
    told = Opt(help + ".", PANELS.get(name, DECODING), (long,), {})
    return flag, Annotated[kind | None, told.typer(flag)]


def _plain(kind: Any) -> Any:
    """The type without its range and without None."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    inner = [one for one in get_args(kind) if one is not type(None)]
    return _plain(inner[0]) if inner else kind


@dataclass(frozen=True, kw_only=True)
class Decoding(Loaded):
    """One way of decoding.  None leaves the default of the checkpoint or the API; a sampler or a
    cache that is not given is `SAMPLER` or `CACHE`."""

    sampler: str | None = option(
        None, "Sampler (default threshold); 'dllm samplers' lists them.", DECODING
    )
    cache: str | None = option(None, "Cache (default none); 'dllm caches' lists them.", DECODING)
    how: Mapping[str, Any] = field(default_factory=dict)  # what is given of `GenerationConfig`

    PARAMETERS: ClassVar = EVERY - ANSWERS

    def load(self) -> "DiffusionModel":
        """The model; misspelt parts are told before it is loaded."""
        from .. import cache, samplers

        samplers.compose(self.sampler or SAMPLER), cache.compose(self.cache or CACHE)
        return super().load()

    def parts(self) -> dict[str, Any]:
        return {"sampler": SAMPLER, "cache": CACHE} | self.named()

    def named(self) -> dict[str, Any]:
        """Those of the two that were given: an autoregressive model takes neither."""
        given = {"sampler": self.sampler, "cache": self.cache}
        return {name: value for name, value in given.items() if value is not None}

    def check_verifier(self) -> None:
        """Raise `ConfigError` for what an autoregressive model has no use for."""
        declared = GenerationConfig.fields()
        for name in (*self.named(), *self.how):
            if name not in GenerationConfig.fields(VERIFIER):
                flag = (name in declared and about_of(declared[name]).flag) or name
                raise ConfigError(f"--{flag.replace('_', '-')} is not an option of an "
                                  "autoregressive model: leave it out")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Generation(Decoding):
    """Decoding after a prompt."""

    PARAMETERS: ClassVar = EVERY
    watch: bool = option(False, "Show the canvas while it is decoded.", OUTPUT)


@dataclass(frozen=True, kw_only=True)
class Answers(Generation):
    """Options of ``dllm generate``."""

    PARAMETERS = Generation.PARAMETERS | {"top_candidates"}
    file: Path | None = option(
        None, "Read the prompt from a file; of a .jsonl file, one per line.", None
    )
    verifier: str | None = option(None, "Autoregressive model whose text is written.", DRAFTING)
    drafter: list[str] | None = option(
        None, "With --verifier: drafters, tried in order (a model, a folder, prompt_lookup, none); "
        "repeatable; default --model.", DRAFTING,
    )  # fmt: skip
    search: str | None = option(None, "Draft search, e.g. cps.", DRAFTING)
    rule: str | None = option(None, "Acceptance rule, e.g. keyed.", DRAFTING)
    controller: str | None = option(None, "Draft length, e.g. 'fixed(k=8)'.", DRAFTING)
    raw: bool = RAW()
    json: bool = JSON()
    trace: Path | None = TRACE()

    @property
    def drafters(self) -> list[str]:
        """Names of drafters; none for plain decoding."""
        named = self.drafter or [self.model]
        return [] if named == ["none"] else named


def _each(option: str, given: Iterable[tuple[int, Any]]) -> dict[int, Any]:
    """What repeated options say of numbers, one thing of each."""
    result: dict[int, Any] = {}
    for number, value in given:
        if number in result:
            raise ConfigError(f"two {option} are about {number}: keep one of them")
        result[number] = value
    return result


def _constraint(text: str) -> tuple[int, str]:
    """``12=The answer is``: where a text stands in the answer, in tokens, and the text."""
    offset, equals, wanted = text.partition("=")
    if not equals or not offset.strip().isdecimal() or not wanted:
        raise ConfigError(f"--constraint is OFFSET=TEXT, e.g. '20=The answer is', not {text!r}")
    return int(offset), wanted


def _span(text: str) -> tuple[int, int]:
    """``4`` or ``4..9``, the last one left out: positions of a draft."""
    low, dots, high = text.strip().partition("..")
    if not low.isdecimal() or (dots and not high.isdecimal()):
        raise ConfigError(f"--remask is a list of positions and spans such as 0,4..9, not {text!r}")
    return int(low), int(high) if dots else int(low) + 1


def _bias(text: str) -> tuple[int, float]:
    """``17=-2.5``: a token and what is added to its logit."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ConfigError(f"--logit-bias is ID=BIAS, e.g. '17=-2.5', not {text!r}") from None


def takes(group: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: fields of ``group`` and parameters become options, its instance is ``options``."""
    hints = get_type_hints(group)
    own = [one for one in fields(group) if OPTION in one.metadata]
    shared = {
        one.name: (
            Annotated[hints[one.name], one.metadata[OPTION].typer(one.name)],
            inspect.Parameter.empty if one.default is MISSING else one.default,
        )
        for one in own
    }
    declared: type[Declared] = getattr(group, "DECLARED", GenerationConfig)
    flags = {
        name: parameter(name, one) for name, one in declared.fields().items()
        if name in getattr(group, "PARAMETERS", ()) and name not in shared
    }  # fmt: skip
    shared |= {flag: (kind, None) for flag, kind in flags.values()}
    shared = dict(sorted(shared.items(), key=lambda item: item[0] != "model"))  # is shown first

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        types = get_type_hints(command, include_extras=True)
        first = [
            parameter.replace(annotation=types[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "options"
        ]
        added = [
            _keyword(name, default=default, annotation=kind)
            for name, (kind, default) in shared.items()
        ]

        @wraps(command)
        def run(**values: Any) -> None:
            given = {one.name: values.pop(one.name) for one in own}
            if flags:
                sent = {name: values.pop(flag) for name, (flag, _) in flags.items()}
                given["how"] = {
                    name: TEXTS[name][1](value) if name in TEXTS else value
                    for name, value in sent.items() if value not in (None, [], ())
                }  # fmt: skip
            command(options=group(**given), **values)

        return _shown(run, [*first, *added])

    return decorate
