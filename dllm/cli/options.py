"""Options that commands share, each declared once.

A group of options is a frozen dataclass whose fields carry their typer declaration.  `takes` gives
a command the fields as options and the command a filled instance as ``options``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from ..config import GenerationConfig
from ..errors import ConfigError
from . import completion
from .inputs import read_ids
from .output import waiting
from .preset import read_preset

if TYPE_CHECKING:
    from ..models import DiffusionModel

DEBUG = "dllm.debug"  # key in the context's meta, which nested contexts share
MODEL, DECODING, DRAFTING, OUTPUT = "Model", "Decoding", "Drafting", "Output"
MEASURING = "Measuring"
SAMPLER, CACHE = "threshold", "none"
RENAMED = {"stop": "stop_strings", "constraint": "constraints"}


def option(text: str, panel: str, *names: str, **settings: Any) -> Any:
    """A typer option under a heading of the help page.  It is called as its field, and by a letter
    that is named; any other name is instead of the field's."""
    return typer.Option(*names, rich_help_panel=panel, help=text, show_default=False, **settings)


def remember_debug(ctx: typer.Context, value: bool) -> bool:
    """Callback of ``--debug``, wherever on the command line it stands."""
    if value:
        ctx.meta[DEBUG] = True
    return value


def the_servers(flag: str) -> ConfigError:
    """The error for an option that does not go with ``--server``."""
    return ConfigError(f"{flag} is the server's: drop it, or set it where the server starts")


EVERYWHERE = {
    "threads": Annotated[
        int | None,
        option("Of the processor; default: timed once, see docs.", MODEL, "--threads", min=1),
    ],
    "debug": Annotated[
        bool, option("Show tracebacks.", OUTPUT, "--debug", callback=remember_debug)
    ],
}  # fmt: skip
Raw = Annotated[bool, option("Take the prompt as it is: no chat template.", DECODING)]
Temperature = Annotated[float | None, option("Default 0: greedy.", DECODING)]
Seed = Annotated[int | None, option("Of all noise, default 0.", DECODING)]
BlockLength = Annotated[int | None, option("Positions of a block.", DECODING, min=1)]
MaxNewTokens = Annotated[int | None, option("Positions of the canvas.", DECODING, min=1)]
Json = Annotated[bool, option("Print a JSON object per answer.", OUTPUT)]
TraceFile = Annotated[
    Path | None, option("Write every step to this file: .json, or .html to look at.", OUTPUT)
]
TopCandidates = Annotated[int | None, option("Candidates per position in the trace.", OUTPUT)]
RunCode = Annotated[bool, option("Let tasks run code of the model.", MEASURING)]


def everywhere(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: the command takes ``--threads`` and ``--debug``."""
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        if values["threads"] is not None:
            from ..models.threads import set_threads

            if values.get("server"):
                raise the_servers("--threads")
            set_threads(values["threads"])
        command(**{name: value for name, value in values.items() if name not in EVERYWHERE})

    own = [parameter.replace(annotation=hints.get(name, parameter.annotation))
           for name, parameter in signature.parameters.items()]  # fmt: skip
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in EVERYWHERE.items()
    ]
    return _shown(run, [*own, *extra])


def _shown(run: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """``run``, which typer takes for a function of ``parameters``."""
    vars(run).pop("__wrapped__")  # its signature is not ours
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a model is loaded, and where."""

    dtype: Annotated[str, option("auto, float32, bfloat16 or float16, default auto.", MODEL)] = (
        "auto"
    )
    device: Annotated[str, option("Default cuda where there is one, else cpu.", MODEL)] = "auto"
    quantization: Annotated[str | None, option("Weights in int8 or int4, on a CPU.", MODEL)] = None
    tokenizer: Annotated[
        str | None, option("Folder or hub id, instead of the model's (or --verifier's).", MODEL)
    ] = None
    adapter: Annotated[
        str | None, option("Low-rank adapter, of the model (or --verifier).", MODEL)
    ] = None

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `dllm.load`; weights of few bits are for a CPU."""
        given = {field.name: getattr(self, field.name) for field in fields(Loading)}
        if self.quantization and self.device == "auto":
            given["device"] = "cpu"
        return {name: value for name, value in given.items() if value is not None}

    def load_model(self, name: str, **other: Any) -> DiffusionModel:
        """The model called ``name`` on its device; ``other`` arguments of `dllm.load` win."""
        from ..models import load

        with waiting(f"loading {name}"):
            return load(name, **{**self.loading, **other})


@dataclass(frozen=True, kw_only=True)
class Loaded(Loading):
    """Which model, and where."""

    model: Annotated[
        str,
        option("Hub id, folder, or nano (default).", MODEL, "-m", autocompletion=completion.models),
    ] = "nano"

    def load(self) -> DiffusionModel:
        """The model on its device."""
        return self.load_model(self.model)


@dataclass(frozen=True, kw_only=True)
class Prompted:
    """How prompts are written."""

    ids: Annotated[bool, option("Prompts are token ids, e.g. '5 17 9'.", DECODING)] = False

    def prompt(self, text: str) -> str | list[int]:
        """What ``text`` stands for."""
        return read_ids(text) if self.ids else text

    def check(self, raw: bool = False) -> None:
        """Raise `ConfigError` for what ids have no use for."""
        if self.ids and raw:
            raise ConfigError("--raw is for texts: token ids are never put into a template")


@dataclass(frozen=True, kw_only=True)
class Ways(Loaded):
    """Several ways of decoding: every sampler with every cache."""

    sampler: Annotated[
        list[str] | None,
        option(
            "Repeatable; {a,b} for several values.",
            DECODING,
            "-s",
            autocompletion=completion.samplers,
        ),
    ] = None
    cache: Annotated[
        list[str] | None,
        option("Default none; repeatable.", DECODING, "-c", autocompletion=completion.caches),
    ] = None
    max_new_tokens: MaxNewTokens = None
    block_length: BlockLength = None

    def given(self, *names: str) -> dict[str, Any]:
        """Those of the fields that were given."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Measured(Ways):
    """Ways of decoding, measured on tasks."""

    tasks: Annotated[
        list[str] | None,
        option(
            "Names or .jsonl files, by commas or repeated.", MEASURING, "--tasks", "--task", "-t"
        ),
    ] = None
    curve: Annotated[
        list[str] | None, option("A sampler along its knob, or 'all'; repeatable.", MEASURING)
    ] = None

    def task_names(self) -> list[str]:
        """The tasks, one by one."""
        parts = (name.strip() for given in self.tasks or () for name in given.split(","))
        return list(dict.fromkeys(name for name in parts if name))

    def curves(self) -> list[str]:
        """The samplers whose curves are wanted."""
        from ..eval.curves import samplers_with_curves

        return samplers_with_curves() if "all" in (self.curve or ()) else self.curve or []


@dataclass(frozen=True, kw_only=True)
class Decoding(Loaded):
    """One way of decoding.  None leaves the default of the checkpoint or the API; a sampler or a
    cache that is not given is that of the preset, or else `SAMPLER` and `CACHE`."""

    sampler: Annotated[
        str | None,
        option(
            "See 'dllm samplers', default threshold.",
            DECODING,
            "-s",
            autocompletion=completion.samplers,
        ),
    ] = None
    cache: Annotated[
        str | None,
        option(
            "See 'dllm caches', default none.", DECODING, "-c", autocompletion=completion.caches
        ),
    ] = None
    preset: Annotated[Path | None, option("A file that 'dllm tune' wrote.", DECODING)] = None
    steps: Annotated[int | None, option("Steps, where the sampler has a quota.", DECODING)] = None
    block_length: Annotated[int | None, option("Positions of a block.", DECODING)] = None
    temperature: Temperature = None
    top_p: Annotated[float | None, option("Nucleus of the proposals, default 1.", DECODING)] = None
    top_k: Annotated[int | None, option("Propose among the best, default all.", DECODING)] = None
    min_p: Annotated[
        float | None, option("Propose what has this share of the best, default all.", DECODING)
    ] = None
    cfg_scale: Annotated[float | None, option("Classifier-free guidance, default 0.", DECODING)] = (
        None
    )
    eos_policy: Annotated[str | None, option("What an end token does.", DECODING)] = None
    seed: Seed = None
    regex: Annotated[str | None, option("Expression that the whole answer matches.", DECODING)] = (
        None
    )
    choice: Annotated[
        list[str] | None, option("Text that the answer may be; repeatable.", DECODING)
    ] = None
    json_schema: Annotated[
        str | None, option("File with the JSON schema of the answer.", DECODING)
    ] = None
    max_rows: Annotated[int | None, option("Most prompts decoded at a time.", DECODING)] = None
    max_batch_tokens: Annotated[int | None, option("Most positions fed at once.", DECODING)] = None
    cuda_graphs: Annotated[bool | None, option("Replay cached steps as CUDA graphs.", DECODING)] = (
        None
    )
    compile: Annotated[
        bool | None, option("Pass cached steps through torch.compile.", DECODING)
    ] = None

    confidence: Annotated[
        str | None, option("'model': how sure a token of a form is without the form.", DECODING)
    ] = None
    literals: Annotated[
        bool | None,
        option("Write what a form leaves no choice about without asking the model.", DECODING),
    ] = None

    def __post_init__(self) -> None:
        """A preset is the sampler, the cache, and whatever else was not given."""
        if self.preset is not None and (self.sampler, self.cache) != (None, None):
            raise ConfigError("a preset says which sampler and cache: drop --preset or them")
        chosen: dict[str, Any] = {"sampler": SAMPLER, "cache": CACHE}
        if self.preset is not None:
            preset = read_preset(self.preset)
            chosen = preset["arguments"] | {name: preset[name] for name in chosen}
        for name, value in chosen.items():
            if hasattr(self, name) and getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def parts(self) -> dict[str, Any]:
        """The sampler and the cache."""
        return {"sampler": self.sampler, "cache": self.cache}

    def arguments(self) -> dict[str, Any]:
        """What was given of the fields of `GenerationConfig`."""
        known = {field.name for field in fields(GenerationConfig)}
        given = {RENAMED.get(f.name, f.name): getattr(self, f.name) for f in fields(self)}
        given["choice"] = self.choice or None  # no option given is an empty list
        return {name: value for name, value in given.items() if name in known and value is not None}


@dataclass(frozen=True, kw_only=True)
class Generation(Decoding):
    """Decoding after a prompt."""

    server: Annotated[
        str | None, option("Ask 'dllm serve' at this URL instead of a model.", MODEL)
    ] = None

    max_new_tokens: Annotated[int | None, option("Positions of the canvas.", DECODING)] = None
    length: Annotated[
        str | None,
        option("How the length is found: append, crop, rho, daedal; --max-new-tokens is then the "
               "most. Default fixed.", DECODING),
    ] = None  # fmt: skip
    min_new_tokens: Annotated[int | None, option("No end before, default 0.", DECODING)] = None
    stop: Annotated[
        list[str] | None, option("Text that ends the answer; repeatable.", DECODING)
    ] = None
    constraint: Annotated[
        list[str] | None, option("OFFSET=TEXT fixed in the answer; repeatable.", DECODING)
    ] = None
    seed_text: Annotated[
        str | None, option("Draft that the answer begins as; [[8]] in it: 8 open tokens.", DECODING)
    ] = None
    remask: Annotated[
        str | None, option("Tokens of the draft to write anew: 0,4..9.", DECODING)
    ] = None
    logit_bias: Annotated[
        list[str] | None, option("ID=BIAS of a token's logit; repeatable.", DECODING)
    ] = None
    watch: Annotated[bool, option("Show the canvas while it is written.", OUTPUT, "-w")] = False
    delay: Annotated[float, option("Seconds to pause per step watched.", OUTPUT, min=0)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay and not self.watch:
            raise ConfigError("--delay is a pause per watched step: add --watch, or drop it")

    def arguments(self) -> dict[str, Any]:
        given = super().arguments()
        if self.stop:
            given["stop_strings"] = tuple(self.stop)
        if self.constraint:
            given["constraints"] = dict(map(_constraint, self.constraint))
        given.pop("logit_bias", None)
        if self.logit_bias:
            given["logit_bias"] = dict(map(_bias, self.logit_bias))
        if self.remask:
            given["remask"] = tuple(map(_span, self.remask.split(",")))
        return given


def _constraint(text: str) -> tuple[int, str]:
    """``12=The answer is``: where a text stands in the answer, in tokens, and the text."""
    offset, equals, wanted = text.partition("=")
    if not equals or not offset.strip().isdigit() or not wanted:
        raise ConfigError(f"--constraint is OFFSET=TEXT, e.g. '20=The answer is', not {text!r}")
    return int(offset), wanted


def _span(text: str) -> tuple[int, int]:
    """``4`` or ``4..9``, the last one left out: positions of a draft."""
    low, dots, high = text.strip().partition("..")
    if not low.isdigit() or (dots and not high.isdigit()):
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
    """Decorator: the fields of ``group`` become options, its instance the argument ``options``."""
    added = get_type_hints(group, include_extras=True)
    for field in fields(group):
        info = get_args(added[field.name])[1]
        first, long = info.default, f"--{field.name.replace('_', '-')}"  # typer's first name
        if first is ... or (not first.startswith("--") and len(field.name) > 1):
            info.param_decls = (() if first is ... else (first,)) + (info.param_decls or ())
            info.default = long

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "options"
        ]
        shared = [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, annotation=added[field.name],
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
            )
            for field in fields(group)
        ]  # fmt: skip

        @functools.wraps(command)
        def run(**values: Any) -> None:
            options = group(**{field.name: values.pop(field.name) for field in fields(group)})
            command(options=options, **values)

        return _shown(run, [*own, *shared])

    return decorate
