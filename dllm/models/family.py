"""What distinguishes one family of checkpoints from another, as data.

A family is one small file: it names the architectures it reads, turns their ``config.json`` into a
transformers config, renames the weights, and states the few facts a decoder needs.  There is no
modelling code: the network itself is a transformers class.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..core.errors import CheckpointError, UnknownNameError, short

ConfigDict = Mapping[str, Any]
UNIFORM = -1  # in place of a mask id: undecided positions hold random ids


@dataclass(frozen=True)
class Facts:
    """What a decoder must know about a loaded model.

    ``mask_token_id`` is None for autoregressive models, and `UNIFORM` (-1) where the noise is
    uniform: an undecided position then holds a random id of the vocabulary.  ``eos_token_id`` ends
    a text and fills what lies behind it; ``stop_token_ids`` are all ids that end one (eos and end
    of turn).  ``logit_shift`` is 1 when ``logits[i]`` predict token ``i + 1``, else 0.
    ``mask_kind`` is "bidirectional", "block_causal" (``block_length`` positions, counted from 0,
    see one another and what is left of them), "causal_prefix" (the same with blocks that are
    counted from the end of the prompt, and causal attention before the open one; with a
    ``sliding_window`` some layers see only so many positions of that), "decided_first" (causal in
    an order in which decided tokens come before masks; a decided token predicts the next one) or
    "causal".  ``context_length`` counts positions, ``vocab_size`` the columns of the logits.
    ``score_source`` says which distribution the family's own sampler scores confidences on: "clean"
    (raw logits) or "tempered" (after temperature and filters).  ``expand_token_id`` asks for
    another mask (DreamOn); ``image_token_id`` stands for an image, which no prompt may hold.
    """

    mask_token_id: int | None
    eos_token_id: int | None
    stop_token_ids: tuple[int, ...]
    pad_token_id: int | None
    bos_token_id: int | None
    logit_shift: int
    mask_kind: str
    context_length: int
    vocab_size: int
    score_source: str
    block_length: int | None = None
    expand_token_id: int | None = None
    sliding_window: int | None = None
    image_token_id: int | None = None

    @cached_property
    def uniform(self) -> bool:
        """Whether undecided positions hold random ids, and no mask."""
        return self.mask_token_id == UNIFORM


@dataclass(frozen=True)
class Release:
    """Ids that every published checkpoint of one vocabulary size shares."""

    facts: Mapping[str, int]  # names as in `Facts`
    tokens: Mapping[str, int] = field(default_factory=dict)  # special tokens the tokenizer needs


@dataclass(frozen=True)
class Published:
    """A checkpoint on the hub: ``name``, its id; ``block_length`` where its files do not say it."""

    name: str
    licence: str = ""  # empty: see its card
    block_length: int | None = None


@dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    ``architectures`` are accepted values of ``architectures[0]``, ``where`` further fields of
    config.json that tell families of one architecture apart (None: any value).  ``to_native``
    translates an official ``config.json`` (a dict) to the transformers config of ``model_class``,
    ``to_official`` goes back.  ``key_map`` renames weights, official regex -> native; an anchored
    regex may capture one layer number as ``(\\d+)``.  ``releases`` is keyed by vocabulary size.
    ``uniform``: the noise is uniform.  ``self_conditioning``: each step is given the embeddings
    that the last one expected.  ``prefix_predicts``: the causal pass over what stands before a
    block predicts its first token.  ``sampler``: its own; ``sampler_fields``: fields of it that
    a ``generation_config.json`` may state.  ``image_field`` of config.json: the id that stands for
    an image, which is not read.
    ``k_first``: its own code filters by top-k before top-p.
    ``any_blocks``: a block length that is given, or known of a published checkpoint, makes the
    attention causal between blocks.  ``verified`` says what the implementation was held against.
    """

    name: str
    architectures: tuple[str, ...]
    model_class: type[PreTrainedModel] | None = None  # whatever class the config names
    to_native: Callable[[ConfigDict], PreTrainedConfig] | None = None
    to_official: Callable[[PreTrainedConfig], dict[str, Any]] | None = None
    logit_shift: int = 0
    mask_kind: str = "bidirectional"
    where: ConfigDict = field(default_factory=dict)
    block_field: str | None = None  # of config.json: the block length of block-causal attention
    block_length: int | None = None  # the same, where config.json does not say it
    score_source: str = "clean"
    k_first: bool = False
    key_map: Mapping[str, str] = field(default_factory=dict)
    ignored_keys: tuple[str, ...] = (r"\brotary_emb\.inv_freq$",)
    float32_rotation: bool = False
    mask_token: str | None = None
    expand_token: str | None = None
    end_of_turn: str | None = None
    tokenizer_class: str = "PreTrainedTokenizerFast"
    chat_template: str | None = None
    replace_chat_template: bool = False  # even when the checkpoint ships one
    releases: Mapping[int, Release] = field(default_factory=dict)
    any_blocks: bool = False
    uniform: bool = False
    self_conditioning: bool = False
    prefix_predicts: bool = False
    sampler: str = "threshold"
    sampler_fields: tuple[str, ...] = ()
    image_field: str | None = None
    thinking: bool | None = None  # what chat templates with ``enable_thinking`` take it for
    checkpoints: tuple[Published, ...] = ()
    verified: str = "by configuration"
    note: str = ""  # a sentence for the page of models

    def published(self, name: str) -> Published | None:
        """The checkpoint of that hub id, or of a folder with its last part; None if unknown."""
        last = name.rpartition("/")[2]
        return next((c for c in self.checkpoints if c.name.rpartition("/")[2] == last), None)

    @property
    def diffusion(self) -> bool:
        """Whether it fills in masks."""
        return self.mask_kind != "causal"

    @property
    def causal(self) -> bool:
        """Whether its network, as transformers runs it, is an autoregressive model."""
        return self.mask_kind in ("causal", "decided_first")

    def reads(self, config: ConfigDict) -> bool:
        """Whether this ``config.json`` is one of the family."""
        architecture = (config.get("architectures") or ["unnamed"])[0]
        wanted = self.where.items()
        return architecture in self.architectures and all(
            config.get(k) == v if v is not None else config.get(k) is not None for k, v in wanted
        )

    def native_key(self, key: str) -> str:
        """Name of an official weight in the transformers class."""
        return _rename(key, self.key_map)

    def official_key(self, key: str) -> str:
        """Inverse of `native_key`.  Raises `CheckpointError` when the key has no official name."""
        official = _rename(key, _inverse(self.key_map))
        if self.native_key(official) != key:
            raise CheckpointError(
                f"weight {key!r} has no official name in family {self.name!r}; "
                'save with layout="native"'
            )
        return official


_FAMILIES: dict[str, Family] = {}

# Families of this library: name -> (module, architectures).  A module is imported, with its network
# of transformers, when its family is met; of two that read an architecture the later is meant.
OWN: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "llada": ("llada", ("LLaDAModelLM",)),
    "dream": ("dream", ("DreamModel",)),
    "dreamon": ("dream", ("DreamOnModel", "DreamModel")),
    "a2d_llama": ("a2d", ("A2DLlamaLMHeadModel",)),
    "a2d_qwen2": ("a2d", ("A2DQwen2LMHeadModel",)),
    "a2d_qwen3": ("a2d", ("A2DQwen3LMHeadModel",)),
    "illada": ("illada", ("ILLaDAForCausalLM",)),
    "stable_diffcoder": ("illada", ("StableDiffcoderForCausalLM",)),
    "sdar": ("block_causal", ("SDARForCausalLM",)),
    "fast_dllm_v2": ("block_causal", ("Fast_dLLM_QwenForCausalLM",)),
    "llada2": ("llada2", ("LLaDA2MoeModelLM",)),
    "llada_moe": ("mixtures", ("LLaDAMoEModelLM", "LLaDAMoEModel")),
    "sdar_moe": ("mixtures", ("SDARMoeForCausalLM",)),
    "nemotron_causal": ("nemotron", ("NemotronLabsDiffusionModel",)),
    "nemotron": ("nemotron", ("NemotronLabsDiffusionModel",)),
    "wedlm_qwen2": ("wedlm", ("WeDLMForCausalLM",)),
    "wedlm": ("wedlm", ("WeDLMForCausalLM",)),
    "diffusion_gemma": ("diffusion_gemma", ("DiffusionGemmaForBlockDiffusion",)),
    "autoregressive": ("autoregressive", ()),  # every causal model of transformers
}

# Diffusion models of other kinds, and why they cannot be read as masked ones.
ELSEWHERE = dict.fromkeys(
    ("MDLM", "BD3LM", "SEDD"),
    "it is a diffusion transformer with adaptive norms, and transformers has no class for it",
)


def register_family(family: Family) -> Family:
    """Make ``family`` known to `dllm.load`; a family of the same name is replaced."""
    _FAMILIES[family.name] = family
    return family


def families() -> Mapping[str, Family]:
    """All families by name: those of this library, then those that were registered."""
    others = {name: family for name, family in _FAMILIES.items() if name not in OWN}
    return MappingProxyType({name: get_family(name) for name in OWN} | others)


def get_family(name: str) -> Family:
    """The family of that name.  Raises `UnknownNameError`."""
    if name not in _FAMILIES and name in OWN:
        for family in vars(import_module(f".{OWN[name][0]}", __package__)).values():
            if isinstance(family, Family):  # one that somebody put in the place of ours stays
                _FAMILIES.setdefault(family.name, family)
    if name not in _FAMILIES:
        raise UnknownNameError("model family", name, {*OWN, *_FAMILIES})
    return _FAMILIES[name]


def family_for(config: ConfigDict) -> Family | None:
    """The family that reads this ``config.json``, by its first architecture; None if there is none.

    Raises `CheckpointError` for diffusion models of other kinds (`ELSEWHERE`).
    """
    architecture = (config.get("architectures") or ["unnamed"])[0]
    if architecture in ELSEWHERE:
        raise CheckpointError(
            f"architecture {architecture!r} is not supported: {ELSEWHERE[architecture]}"
        )
    for name, family in reversed(_FAMILIES.items()):  # the latest registration wins
        if name not in OWN and family.reads(config):
            return family
    for name, (_, architectures) in reversed(list(OWN.items())):
        if architecture in architectures and get_family(name).reads(config):
            return get_family(name)
    causal = get_family("autoregressive")
    return causal if causal.reads(config) else None


def require(config: ConfigDict, names: Iterable[str], family: str) -> dict[str, Any]:
    """The named fields.  Raises `CheckpointError` on missing ones: class defaults differ."""
    names = tuple(names)
    missing = [name for name in names if name not in config]
    if missing:
        raise CheckpointError(
            f"config.json lacks {', '.join(missing)}, which a {family} checkpoint must state; "
            "take the complete file from the original checkpoint"
        )
    return {name: config[name] for name in names}


def demand(config: ConfigDict, wanted: ConfigDict, family: str) -> None:
    """Raise `CheckpointError` when a field is present with a value this family does not implement.

    ``wanted`` maps a field to the only supported value; a missing or null field passes.
    """
    for name, value in wanted.items():
        result = config.get(name)
        if result is not None and result != value:
            raise CheckpointError(
                f"config.json has {name}={short(result)}; {family} checkpoints are supported with "
                f"{name}={value!r} only"
            )


def _rename(key: str, rules: Mapping[str, str]) -> str:
    for pattern, target in rules.items():
        renamed, hits = re.subn(pattern, target, key)
        if hits:
            return renamed
    return key


def _inverse(rules: Mapping[str, str]) -> dict[str, str]:
    """The rules backwards: each target becomes an anchored regex, each regex a template."""
    number = r"(\d+)"
    return {
        "^" + re.escape(target).replace(re.escape(r"\1"), number): pattern.removeprefix("^")
        .replace(number, r"\1")
        .replace(r"\.", ".")
        for pattern, target in rules.items()
    }
