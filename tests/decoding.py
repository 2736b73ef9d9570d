"""An engine all of whose rows have one recipe, run from beginning to end or step by step."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dllm.cache import Cache
from dllm.core.canvas import Canvas
from dllm.core.config import GenerationConfig
from dllm.engine import Engine, MaskedRecipe, Row, Step
from dllm.engine.forward import Forward
from dllm.engine.recipe import check_recipe
from dllm.kernels.noise import uniform
from dllm.models import DiffusionModel
from dllm.runtime.result import Result
from dllm.samplers import Sampler


def replayed(result: Result) -> tuple[Any, ...]:
    """What was decided, when and with how many forwards; bits of log-probabilities aside."""
    assert result.trace is not None
    commits = [[(p, t) for p, t, _ in step.commits] for step in result.trace.steps]
    return result.sequences.tolist(), result.nfe, result.order, commits


def canvas_for(
    model: DiffusionModel, prompt: Any, masks: int, seed: int = 0, **more: Any
) -> Canvas:
    """A canvas of ``model`` whose noise is keyed by ``seed``."""
    facts = model.facts
    assert facts.mask_token_id is not None and facts.eos_token_id is not None
    return Canvas.for_prompt(
        np.asarray(prompt, np.int64), masks, mask_id=facts.mask_token_id, pad_id=facts.eos_token_id,
        noise=lambda stream, step, at: uniform(seed, stream, at, step, 0), **more,
    )  # fmt: skip


class Decoding:
    def __init__(
        self, model: DiffusionModel, sampler: Sampler, cache: Cache,
        config: GenerationConfig | None = None,
    ) -> None:  # fmt: skip
        self.sampler, self.cache = sampler, cache
        self.recipe = MaskedRecipe(sampler, config=config or GenerationConfig())
        check_recipe(self.recipe, cache, model)
        self.engine = Engine(model, cache)

    @property
    def forward(self) -> Forward:
        return self.engine.forward

    def run(self, canvases: Sequence[Canvas]) -> Iterator[list[Step]]:
        yield from self.engine.run(canvases, self.recipe)

    def open(self, canvases: Sequence[Canvas]) -> list[Row]:
        """Rows that stay when they are finished, so that their slots can be looked at."""
        rows = [self.engine.admit(canvas, self.recipe, held=True) for canvas in canvases]
        assert all(row is not None for row in rows)
        return [row for row in rows if row is not None]

    def resume(self, rows: Sequence[Row]) -> Iterator[list[Step]]:
        while any(not row.canvas.finished for row in rows):
            yield self.engine.step(rows)
            for row in rows:
                if row.error is not None:
                    raise row.error

    def logits(self, row: Row) -> torch.Tensor:
        return self.engine.scores([row])[0]
