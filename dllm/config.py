"""Arguments of a generation: one frozen dataclass, validated, keyword-only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import ConfigError, UnknownNameError


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How to decode.  Names follow transformers where it has one.

    ``max_new_tokens``: positions of the canvas after the prompt; None (default) takes what the
    checkpoint recommends, else 128 or what is left of the context.  ``min_new_tokens``: stop ids
    are not proposed among the first that many positions.  ``steps`` and ``block_length`` go to the
    parts of the sampler that have such a field; None leaves their default.  ``temperature`` 0 is
    greedy, and so is anything below 1e-6; ``top_p``, ``top_k`` (0 = off) filter proposals.
    ``cfg_scale`` > 0: classifier-free guidance, two lanes per row.  ``eos_policy``: what a stop id
    does (see `dllm.samplers.eos`).  ``stop_strings`` end the text where they first appear.
    ``seed``: all random choices are a function of it, the prompt's repetition count, position and
    step.  ``max_rows``: most texts that are decoded at a time (default 32); further ones join as
    others finish.  ``max_batch_tokens``: most token positions fed to the model at once.
    ``top_candidates``: record that many candidates per prediction.  ``cuda_graphs``: pad cached
    steps to a few sizes and replay each as one CUDA graph; off a GPU the padded steps run as they
    are.  ``compile``: pass the network of such steps
    through `torch.compile`.  ``suppress_mask=False`` lets the model propose [MASK], as most
    official code does: only for exact reproduction of its probabilities.  ``constraints`` fixes
    parts of the answer: offset from its start -> token id, or text whose tokens stand from there
    on; the answer does not end before the last of them.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    steps: int | None = None
    block_length: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
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

    def __post_init__(self) -> None:
        if isinstance(self.stop_strings, str):
            object.__setattr__(self, "stop_strings", (self.stop_strings,))
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        for name in ("max_new_tokens", "steps", "block_length", "max_rows", "max_batch_tokens"):
            self._at_least(name, 1)
        for name in ("min_new_tokens", "top_k", "temperature", "cfg_scale", "top_candidates"):
            self._at_least(name, 0)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must lie in (0, 1], not {self.top_p}")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}"
            )
        for offset, wanted in self.constraints.items():
            if not isinstance(offset, int) or offset < 0 or not isinstance(wanted, int | str):
                raise ConfigError(
                    "constraints map offsets in the answer (0 is its first token) to a token id or "
                    f"a text, not {offset!r} to {wanted!r}"
                )
        if any(not text for text in self.stop_strings):
            raise ConfigError("stop_strings must not be empty strings")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must lie in [0, 2**63), not {self.seed}")

    def _at_least(self, name: str, least: int) -> None:
        value, integral = getattr(self, name), name not in ("temperature", "cfg_scale")
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int if integral else int | float):
            raise ConfigError(f"{name} must be a number, not {value!r}")
        if not math.isfinite(value):
            raise ConfigError(f"{name} must be finite, not {value}")
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, not {value}")

    @classmethod
    def build(cls, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> GenerationConfig:
        """``given`` over ``defaults`` (a checkpoint's own), with unknown names refused."""
        known = {f.name for f in fields(cls)}
        for name in given:
            if name not in known:
                raise UnknownNameError("generation argument", name, known)
        merged = {key: value for key, value in defaults.items() if key in known}
        return cls(**{**merged, **given})

    @property
    def sampler_options(self) -> dict[str, Any]:
        """What goes to the parts of the sampler."""
        names = ("steps", "block_length", "eos_policy")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
