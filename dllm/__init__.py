"""dllm: the runtime for masked-diffusion language models.

>>> import dllm
>>> out = dllm.generate("nano", "Reverse this list: Tom, Anna, Ben", sampler="threshold")
>>> out.text
'Ben, Anna, Tom'
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a checkout `dllm.samplers` and its three siblings stand beside this folder, not in it.
_checkout = Path(__file__).parents[1]
if (_checkout / "pyproject.toml").is_file() and (_checkout / "samplers" / "base.py").is_file():
    __path__.append(str(_checkout))

if TYPE_CHECKING:
    from . import cache, samplers
    from .api import as_completed, generate, infill, stream
    from .core.config import GenerationConfig
    from .core.errors import (
        CancelledError,
        CheckpointError,
        ConfigError,
        DeadlineError,
        DllmError,
        NumericError,
        OutOfMemoryError,
        PromptError,
        QueueFullError,
        UnknownNameError,
    )
    from .drafting import DiffusionDrafter, SpeculativeResult, speculate, stream_speculate
    from .likelihood.api import score
    from .likelihood.scoring import Score
    from .likelihood.step import Guesses, step
    from .models import DiffusionModel, load
    from .runtime.events import Event
    from .runtime.handle import Handle
    from .runtime.result import Result
    from .runtime.trace import Trace
    from .session import Session, StepReport

__version__ = "1.0.0rc1"

# Imported on first use: `import dllm` stays cheap and `dllm --help` needs no torch.
_ROOMS = {
    "api": "as_completed generate infill stream",
    "core.config": "GenerationConfig",
    "core.errors": "CancelledError CheckpointError ConfigError DeadlineError DllmError "
    "NumericError OutOfMemoryError PromptError QueueFullError UnknownNameError",
    "drafting": "DiffusionDrafter SpeculativeResult speculate stream_speculate",
    "likelihood": "Score score",
    "likelihood.step": "Guesses step",
    "models": "DiffusionModel load",
    "runtime.events": "Event",
    "runtime.handle": "Handle",
    "runtime.result": "Result",
    "runtime.trace": "Trace",
    "session": "Session StepReport",
}
_WHERE = {name: room for room, names in _ROOMS.items() for name in names.split()}

# What other libraries have, and the line to write here.
_GUESSES = {
    "LLM": "model = dllm.load(name), then dllm.generate(model, prompts)",
    "SamplingParams": "pass them: dllm.generate(model, prompt, temperature=0.7, top_p=0.9)",
    "stream_generate": "for event in dllm.stream(model, prompt): print(event.text, end='')",
    "chat": "dllm.generate(model, [{'role': 'user', 'content': 'Hello'}])",
    "pipeline": "model = dllm.load(name), then dllm.generate(model, prompt)",
    **dict.fromkeys(
        ("AutoModel", "AutoModelForCausalLM", "from_pretrained"), "model = dllm.load(name)"
    ),
    "AutoTokenizer": "model = dllm.load(name), then model.tokenizer",
}

__all__ = [
    "CancelledError", "CheckpointError", "ConfigError", "DeadlineError", "DiffusionDrafter",
    "DiffusionModel", "DllmError", "Event", "GenerationConfig", "Guesses", "Handle", "NumericError",
    "OutOfMemoryError", "PromptError", "QueueFullError", "Result", "Score", "Session",
    "SpeculativeResult", "StepReport",
    "Trace", "UnknownNameError", "as_completed", "cache", "generate", "infill", "load", "samplers",
    "score", "speculate", "step", "stream", "stream_speculate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    if name in ("cache", "samplers"):
        return import_module(f".{name}", __name__)
    told = f": {_GUESSES[name]}" if name in _GUESSES else ""
    raise AttributeError(f"module 'dllm' has no attribute {name!r}{told}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
