"""``dllm chat``: a conversation."""

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.config import GenerationConfig
from ..core.declared import MACHINE
from ..core.errors import ConfigError, DllmError, PromptError
from .app import Terminated
from .bundled import ABILITIES, is_bundled, warn_of_unknown_words
from .options import DECODING, Generation, option, takes
from .output import complain, interactive, note, shown, waiting
from .watch import watch

if TYPE_CHECKING:
    from ..models import DiffusionModel
    from ..runtime.result import Result
    from ..session import Session

# Options of the help page; --help-all has all.
SHOWN = (
    "model sampler cache max_new_tokens temperature seed system drafter quantization watch"
).split()
HELP = "/reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer"


@dataclass(frozen=True, kw_only=True)
class Talking(Generation):
    """Options of ``dllm chat``."""

    PARAMETERS = Generation.PARAMETERS - {"max_batch_size"}
    system: str | None = option(None, "System message at the start.", DECODING)
    drafter: list[str] | None = option(
        None, "Drafters of an autoregressive model, tried in order; repeatable.", DECODING
    )


@takes(Talking)
def chat(*, options: Talking) -> None:
    """Talk to a model.  Answers go to stdout, everything else to stderr.

    /reset forgets the conversation, /quit or the end of input ends it.
    """
    from ..cache import compose
    from ..session import Session

    model = options.load()
    if model.tokenizer is None or not model.tokenizer.chat_template:
        raise PromptError(f"{model.name} has no chat template: use dllm generate")
    note(f"{model.name}: {HELP}")
    if is_bundled(model):
        note(
            f"{model.name} was trained on single questions, so each is asked alone, without what "
            f"was said before; it can {ABILITIES}"
        )
    diffuses = model.facts.mask_token_id is not None
    if diffuses and options.drafter:
        raise ConfigError(f"{model.name} is a diffusion model: it takes no --drafter")
    if not diffuses:
        options.check_verifier()
        if options.watch:
            raise ConfigError("--watch follows a canvas: leave it out with an autoregressive model")
    named = options.drafter or []
    drafter = named[0] if len(named) == 1 else named or None
    cache = options.parts()["cache"]
    how: dict[str, Any] = {"cache": cache} if diffuses else {"drafter": drafter}
    engine = GenerationConfig.fields(MACHINE).keys() & options.how
    if diffuses and (options.watch or engine or not compose(cache).exact):
        Conversation(model, options).run()
    else:
        with Session(model, max_batch_size=1, **how) as session:  # keeps the turns before
            Conversation(model, options, session).run()


class Conversation:
    """The messages so far, and the loop that adds to them; ``session`` answers where there is one.
    Bundled models are asked without the messages before a question."""

    def __init__(
        self, model: "DiffusionModel", options: Talking, session: "Session | None" = None
    ) -> None:
        self.model, self.options, self.session = model, options, session
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        system = self.options.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def run(self) -> None:
        """Until /quit or the end of input."""
        while (line := read_line()) is not None:
            text = line.strip()
            if text == "/quit":
                return
            if text == "/reset":
                self.reset()
                note("the conversation starts over")
            elif text.startswith("/") and text[1:].isalpha():
                note(HELP)
            elif text:
                self.turn(text)

    def turn(self, text: str) -> None:
        """One question; when it fails or is stopped, the conversation stays as it was."""
        if is_bundled(self.model):
            self.reset()
        self.messages.append({"role": "user", "content": text})
        try:
            result = self.answer()
        except DllmError as error:
            self.messages.pop()
            complain(error)
            if len(self.messages) > 1:
                note("/reset starts over")
        except Terminated:
            raise
        except KeyboardInterrupt:
            self.messages.pop()
            note("stopped")
        else:
            self.messages.append({"role": "assistant", "content": result.text})
            print(shown(result.text), flush=True)
            note(result.footer())
            warn_of_unknown_words(self.model, [text])

    def answer(self) -> "Result":
        """What the model says to the messages."""
        from ..api import generate, stream

        options = self.options
        if self.session is not None:
            diffuses = self.model.facts.mask_token_id is not None
            sampler: dict[str, Any] = {"sampler": options.parts()["sampler"]} if diffuses else {}
            handle = self.session.submit(self.messages, **options.how, **sampler)
            with waiting("writing"):
                try:
                    return handle.result()
                except KeyboardInterrupt:
                    handle.cancel()
                    raise
        given: dict[str, Any] = {**options.how, **options.parts()}
        if options.watch:
            return watch(stream(self.model, self.messages, **given), self.model, 1)[0]
        with waiting("writing"):
            result: Result = generate(self.model, self.messages, **given)
        return result


def read_line() -> str | None:
    """One line of input, None at its end.  The prompt sign never reaches a redirected stdout."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    try:
        if sys.stdout.isatty():
            with suppress(ImportError):  # arrow keys and history, where the platform has them
                import readline  # noqa: F401
            return input("> ")
        if interactive():
            print("> ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline() or None
    except EOFError:
        note("")
        return None
