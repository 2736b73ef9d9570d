"""``dllm compare``: one prompt, several samplers and caches, side by side."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .bundled import warn_of_unknown_words
from .inputs import read_text
from .options import JSON, RAW, Prompt, Ways, takes
from .output import as_json, shown, waiting

if TYPE_CHECKING:
    from ..models import DiffusionModel
    from ..runtime.result import Result

DEFAULT = ["llada", "threshold"]
NARROWEST = 24  # columns in which a text can still be read beside the figures
SHORTEST = 18  # columns to which the names of samplers are folded


@dataclass(frozen=True, kw_only=True)
class Comparison(Ways):
    """Options of ``dllm compare``."""

    PARAMETERS: ClassVar[tuple[str, ...]] = (*Ways.PARAMETERS, "temperature", "seed")
    raw: bool = RAW()
    json: bool = JSON()


@takes(Comparison)
def compare(prompt: Prompt = None, *, options: Comparison) -> None:
    """Answer one prompt in several ways: text, forwards, positions, seconds."""
    with waiting("loading dllm"):
        from ..api import generate
        from ..eval.curves import settings

    text = read_text(prompt, None)
    given = options.given("max_new_tokens", "block_length", "temperature", "seed")
    ways = settings(options.sampler or DEFAULT, [], options.cache or ["none"], given)
    model = options.load()
    chat = False if options.raw else None
    calls = [{"sampler": w.sampler, "cache": w.cache, "chat": chat, **w.arguments} for w in ways]
    generate(model, text, **calls[0])  # warm-up, not shown
    results = [generate(model, text, **call) for call in calls]
    if options.json:
        for result in results:
            print(as_json(result, model))
    else:
        show(results, model)
    warn_of_unknown_words(model, [text])


def show(results: list["Result"], model: "DiffusionModel") -> None:
    """A table on stdout, texts beside or below; texts that equal the first one are marked."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("Sampler", overflow="fold")
    for name in ("Cache", "Forwards", "Positions", "Tokens/forward", "Seconds"):
        table.add_column(name, justify="left" if name == "Cache" else "right", no_wrap=True)
    texts = []
    for i, result in enumerate(results):
        same = i > 0 and result.tokens == results[0].tokens
        texts.append(Text("= first" if same else shown(result.text), style="dim" if same else ""))
        table.add_row(
            Text(result.sampler), result.cache, str(result.nfe), str(result.computed),
            f"{result.tokens_per_forward:.2f}", f"{result.seconds:.3f}",
        )  # fmt: skip
    console = Console(highlight=False)
    natural = Measurement.get(console, console.options.update(max_width=999), table).maximum
    room = console.width - natural
    if room >= NARROWEST:
        table.add_column("Text", ratio=1, overflow="fold")
        table.columns[-1]._cells.extend(texts)
    # Long names are folded; figures are never cut: the terminal wraps them where it is too narrow.
    folded = max(len(result.sampler) for result in results) - SHORTEST
    console.width = max(console.width, natural - max(0, folded))
    console.print(table)
    if room < NARROWEST:
        for result, text in zip(results, texts, strict=True):
            console.print(Text(f"{result.sampler} · {result.cache}", style="bold"))
            console.print(text, soft_wrap=True)
            console.print()
    count = f"{len(results)} setting{'s' * (len(results) > 1)}"
    console.print(Text(f"{model.name}, {count}, one warm-up before", style="dim"))
