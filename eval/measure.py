"""One setting on one task: what it answered, and what that cost."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..api import as_completed, generate
from ..core.errors import ConfigError
from ..models import DiffusionModel
from .metrics import wilson
from .problems import AnyTask, check_fits, draw, stamp

FORMAT = 2


@dataclass(frozen=True)
class Setting:
    """How to decode.  ``method`` names the curve that it is a point of."""

    method: str
    sampler: str
    cache: str = "none"
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.sampler if self.cache == "none" else f"{self.sampler} · {self.cache}"


@dataclass(frozen=True)
class Cell:
    """A setting on ``examples`` examples of a task, ``rows`` of them decoded together."""

    task: str
    setting: Setting
    examples: int
    seed: int = 0
    rows: int = 32

    def key(self, model: str) -> str:
        """What identifies a measurement: everything that can change its result."""
        how = self.setting
        arguments = sorted(how.arguments.items())
        text = repr((FORMAT, model, self.task, how.sampler, how.cache, arguments, self.examples,
                     self.seed, self.rows))  # fmt: skip
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


@dataclass(frozen=True)
class Record:
    """A measured cell.  ``right``, ``tokens``, ``nfe``, ``computed`` have one entry per example.

    ``tokens``: generated, up to and including the first stop id, prompt excluded; ``nfe``: forwards
    of the row; ``computed``: token positions fed to the model for it; ``seconds``: decoding of all
    examples, after a warm-up; ``peak_memory`` in bytes.
    """

    key: str
    model: str
    task: str
    method: str
    sampler: str
    cache: str
    arguments: Mapping[str, Any]
    examples: int
    seed: int
    rows: int
    right: Sequence[bool]
    tokens: Sequence[int]
    nfe: Sequence[int]
    computed: Sequence[int]
    forced: int
    seconds: float
    peak_memory: int

    @property
    def point(self) -> tuple[float, float]:
        """(tokens per forward, percent right)."""
        return sum(self.tokens) / max(1, sum(self.nfe)), 100 * self.accuracy

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the accuracy."""
        return wilson(sum(self.right), len(self.right))

    def mean(self, name: str) -> float:
        """Mean of ``tokens``, ``nfe`` or ``computed`` per example; seconds per example."""
        value = getattr(self, name)
        return float(value if isinstance(value, float) else sum(value)) / self.examples


def fingerprint(model: DiffusionModel) -> str:
    """Tells checkpoints of one name apart: shapes, some values of all weights, kind of device, and
    what their files say of prompts and decoding."""
    template = getattr(model.tokenizer, "chat_template", None)
    about = model.device.type, model.facts, sorted(model.generation_defaults.items()), template
    digest = hashlib.blake2b(repr(about).encode(), digest_size=8)
    for name, tensor in sorted(model.hf.state_dict().items()):
        few = tensor.detach().reshape(-1)[:64].float().cpu().numpy()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode() + few.tobytes())
    return f"{model.name}@{digest.hexdigest()}"


class RefusedError(ConfigError):
    """The model does not go with the setting: a sampler without its trained part, say."""


def measure(
    model: DiffusionModel, problems: AnyTask, cell: Cell, identity: str,
    answered: Callable[[int], None] = lambda _: None,
) -> Record:  # fmt: skip
    """Decode the examples and check the answers.  ``identity`` is the model's fingerprint;
    ``answered`` is called with the number of answers so far."""
    examples = draw(problems, cell.examples, cell.seed)
    how = {"sampler": cell.setting.sampler, "cache": cell.setting.cache, **cell.setting.arguments}
    check_fits(model, examples, int(how.get("max_new_tokens") or 1), cell.task)
    prompts = [example.prompt for example in examples]
    try:
        generate(model, prompts[:1], **how)  # warm-up, not measured
    except ConfigError as error:
        raise RefusedError(str(error)) from error
    began = time.perf_counter()
    results: dict[int, Any] = {}
    for index, out in as_completed(model, prompts, max_batch_size=cell.rows, **how):
        results[index] = out
        answered(len(results))
    outs = [results[index] for index in range(len(prompts))]
    seconds = time.perf_counter() - began
    texts = [out.text for out in outs]
    return Record(
        key=cell.key(identity + stamp(problems)), model=identity, task=cell.task,
        examples=cell.examples, seed=cell.seed, rows=cell.rows, **vars(cell.setting),
        right=[bool(problems.check(e, t)) for e, t in zip(examples, texts, strict=True)],
        tokens=[len(out.tokens) for out in outs], nfe=[out.nfe for out in outs],
        computed=[out.computed for out in outs], forced=sum(out.forced for out in outs),
        seconds=seconds, peak_memory=max(out.peak_memory for out in outs),
    )  # fmt: skip
