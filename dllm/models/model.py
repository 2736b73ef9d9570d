"""A loaded model: the network, its tokenizer, and the facts that decoding needs."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.errors import ConfigError
from .family import Facts, Family
from .quantisation import of_config, parameters
from .saving import save

_DELIMITERS: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, ...]] = WeakKeyDictionary()
_SPECIAL: WeakKeyDictionary[Any, tuple[Any, dict[int, str]]] = WeakKeyDictionary()


# What other libraries' models have, and what to write here.
GUESSES = {
    "to": "where it lies is said when it is loaded: dllm.load(name, device='cuda', dtype=...)",
    **dict.fromkeys(("cuda", "cpu", "half"), "say it when loading: dllm.load(name, device=...)"),
    "eval": "a loaded model is in eval mode",
    "config": "the network's is model.hf.config, what decoding needs model.facts",
    "generate_stream": "it is model.stream(prompt)",
    "chat": "pass messages: model.generate([{'role': 'user', 'content': ...}])",
    "parameters": "those of the network: model.hf.parameters()",
    "train": "see dllm train, or model.hf for a network of transformers",
}


@dataclass(frozen=True, repr=False, eq=False)
class DiffusionModel:
    """What `dllm.load` returns.

    ``hf`` is a transformers model in eval mode: ``hf(input_ids, attention_mask=...)`` gives raw
    logits (B, L, V), unshifted even if ``facts.logit_shift`` is 1; bidirectional unless
    ``facts.mask_kind`` is "causal", or "decided_first": then causal in the order that it is fed.
    ``tokenizer`` is None when the checkpoint has none.
    ``generation_defaults`` are arguments of `dllm.generate` that the checkpoint recommends, e.g.
    ``{"max_new_tokens": 32, "block_length": 32}``.  ``official_config`` is the ``config.json``
    the model came from, empty if it never had one of the official class.
    """

    hf: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    family: Family
    facts: Facts
    name: str
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    official_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def backbone(self) -> nn.Module:
        """The network without its head: token ids to hidden states (B, L, D)."""
        return self.hf.base_model

    @property
    def head(self) -> nn.Module:
        """Hidden states (..., D) to logits (..., V)."""
        head: nn.Module = self.hf.get_output_embeddings()  # type: ignore[no-untyped-call]
        return head

    @property
    def layers(self) -> int:
        """How many layers have keys and values."""
        return int(self.hf.config.get_text_config().num_hidden_layers)

    @property
    def embedding(self) -> Any:
        """Token ids to the input of the first layer."""
        return self.hf.get_input_embeddings()

    @property
    def device(self) -> torch.device:
        return torch.device(self.hf.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    def delimiters(self) -> tuple[int, ...]:
        """Ids that end a unit of text: what ``generation_config.json`` lists as ``delimiters``,
        else every token with a line break in it."""
        given = self.generation_defaults.get("delimiters")
        if given is not None or self.tokenizer is None:
            return tuple(given or ())
        known = _DELIMITERS.get(self.tokenizer)
        if known is None:
            ids = sorted(self.tokenizer.get_vocab().values())
            pieces = zip(ids, self.tokenizer.batch_decode([[i] for i in ids]), strict=True)
            known = tuple(i for i, piece in pieces if "\n" in piece)
            _DELIMITERS[self.tokenizer] = known
        return known

    def generate(self, prompt: Any, **options: Any) -> Any:
        """As `dllm.generate`."""
        return import_module("dllm").generate(self, prompt, **options)

    def stream(self, prompt: Any, **options: Any) -> Any:
        """As `dllm.stream`."""
        return import_module("dllm").stream(self, prompt, **options)

    def __getattr__(self, name: str) -> Any:
        told = GUESSES.get(name)
        raise AttributeError(
            f"a DiffusionModel has no {name}" + (f": {told}" if told else ""), name=name, obj=self
        )

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ConfigError("a loaded model is called as model.generate(prompt), or for logits as "
                          "model.hf(input_ids)")  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        raise ConfigError(
            "a model is one thing, and comes first: model = dllm.load(...), then "
            "dllm.generate(model, prompt); its tokenizer is model.tokenizer"
        )

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        layout: str = "native",
        max_shard_size: int | str = "5GB",
    ) -> None:
        """Write weights, config and tokenizer to ``folder``; `dllm.load` reads it back exactly.

        ``layout`` "native" keeps the names of the transformers class and adds a ``dllm`` section
        to ``config.json``; "official" writes the names and fields of the original release.
        Raises `ConfigError` for another layout or a model that cannot be written (quantised,
        offloaded, or without an official layout).
        """
        save(self, folder, layout, max_shard_size)

    def __repr__(self) -> str:
        count = parameters(self.hf)
        size = next(
            (f"{count / n:.1f}{unit}" for n, unit in ((1e9, "B"), (1e6, "M")) if count >= n),
            f"{count / 1e3:.0f}K",
        )
        dtype = str(self.dtype).removeprefix("torch.")
        how = of_config(getattr(self.hf.config, "quantization_config", None))
        dtype = dtype if how is None else f"int{how.bits} and {dtype}"
        return f"<{self.name}: {self.family.name}, {size} parameters, {dtype} on {self.device}>"


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Id and name of every token that is no text.  transformers lists those with a role only: the
    headers and turn ends of many checkpoints are none."""
    now = len(tokenizer), tokenizer.all_special_tokens
    known = _SPECIAL.get(tokenizer)
    if known is None or known[0] != now:  # Gemma has 6,000 added tokens
        found = dict(zip(tokenizer.all_special_ids, now[1], strict=True))
        with suppress(NotImplementedError):  # mistral-common's
            added = tokenizer.added_tokens_decoder.items()
            found |= {i: token.content for i, token in added if token.special}
        known = _SPECIAL[tokenizer] = now, found
    return known[1]
