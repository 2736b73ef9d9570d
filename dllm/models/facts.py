"""The facts of a checkpoint, read from its own files and compared with what is known of it."""

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..core.errors import CheckpointError, ConfigError, UnknownNameError
from .family import UNIFORM, ConfigDict, Facts, Family, Published
from .fields import FACTS, own_section

UNBOUNDED = 2**30  # positions of networks that state no limit
ATTENTION = {  # kinds of it, in words
    "bidirectional": "bidirectional",
    "block_causal": "causal between blocks",
    "decided_first": "causal, decided tokens first",
    "causal_prefix": "causal before the open block",
    "causal": "causal",
}
# What generation_config.json may recommend.
GENERATION = ("max_new_tokens", "block_length", "delimiters")


def read_facts(
    family: Family, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None,
    *, raw: ConfigDict, generation: ConfigDict, given: Mapping[str, Any],
    published: Published | None = None,
) -> Facts:  # fmt: skip
    """Join all sources: ``given`` by the caller, the ``dllm`` section of the ``raw`` config.json,
    its other fields, generation_config.json, the tokenizer, what is ``published`` of the checkpoint
    and its family; the first that speaks wins.

    Raises `CheckpointError` when an id lies outside the vocabulary, when a diffusion model has no
    mask id, or when an id that was not ``given`` differs from the published one.
    """
    _check_given(given)
    section = own_section(raw)
    sources: list[Mapping[str, Any]] = [given, section, raw, generation]
    vocabulary: Mapping[Any, int] = {} if tokenizer is None else tokenizer.get_vocab()
    if tokenizer is not None:
        names = ("mask_token_id", "eos_token_id", "pad_token_id", "bos_token_id")
        sources.append({name: getattr(tokenizer, name) for name in names})
        named = {"mask_token_id": family.mask_token, "expand_token_id": family.expand_token}
        sources.append({name: vocabulary.get(token) for name, token in named.items()})
    release = family.releases.get(config.get_text_config().vocab_size)
    if release is not None:
        sources.append(release.facts)

    def first(name: str, default: Any = None) -> Any:
        return next((s[name] for s in sources if s.get(name) is not None), default)

    eos = _ids(first("eos_token_id"))
    eos_id = eos[0] if eos else None
    stops = first("stop_token_ids")
    if stops is None:
        turn_end = vocabulary.get(family.end_of_turn)
        stops = (*_ids(generation.get("eos_token_id")), *_ids(turn_end))
        if family.diffusion and tokenizer is not None:  # DiffuCoder fills the rest with a token
            odd = (None, tokenizer.unk_token_id, tokenizer.mask_token_id)  # that it names alone
            stops += () if tokenizer.pad_token_id in odd else (tokenizer.pad_token_id,)
    text: Any = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or UNBOUNDED
    known = published.block_length if published else None
    blocks = _own(
        given, section, "block_length",
        raw.get(family.block_field or "", known or family.block_length),
    )  # fmt: skip
    _check_blocks(family, blocks, given)
    kinds = getattr(text, "layer_types", None) or ()
    sliding = family.mask_kind == "causal_prefix" and "sliding_attention" in kinds
    mask_id = given.get("mask_token_id", UNIFORM) if family.uniform else first("mask_token_id")
    facts = Facts(
        mask_token_id=mask_id if family.diffusion else None, eos_token_id=eos_id,
        stop_token_ids=tuple(dict.fromkeys((*eos, *stops))),
        pad_token_id=first("pad_token_id", eos_id), bos_token_id=first("bos_token_id"),
        logit_shift=_own(given, section, "logit_shift", family.logit_shift),
        mask_kind="block_causal" if blocks and family.any_blocks else family.mask_kind,
        context_length=_own(given, section, "context_length", positions),
        vocab_size=text.vocab_size,
        score_source=_own(given, section, "score_source", family.score_source), block_length=blocks,
        expand_token_id=first("expand_token_id"),
        sliding_window=text.sliding_window if sliding else None,
        image_token_id=raw.get(family.image_field or ""),
    )  # fmt: skip
    _check_range(facts, family)
    _check_release(facts, family, given)
    if family.diffusion:
        _check_company(facts, text)
    return facts


def generation_defaults(
    raw: ConfigDict, generation: ConfigDict, facts: Facts, family: Family
) -> dict[str, Any]:
    """Recommended arguments: the block length of the attention, those of
    ``generation_config.json`` that mean the same here, also of the sampler, the ``generation``
    entry of the ``dllm`` section."""
    known = {"block_length": facts.block_length} if facts.block_length else {}
    stated = {**generation, **(generation.get("sampler_config") or {})}
    names = (*GENERATION, *family.sampler_fields)
    known |= {name: stated[name] for name in names if stated.get(name) is not None}
    return known | dict(own_section(raw).get("generation") or {})


def _own(given: ConfigDict, section: ConfigDict, name: str, default: Any) -> Any:
    return given.get(name, section.get(name, default))


def _ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _check_given(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name not in FACTS:
            raise UnknownNameError("model fact", name, FACTS)
        fits, words = FACTS[name]
        if value is not None and not fits(value):
            raise ConfigError(f"{name} is {words}, not {value!r}")


def _check_blocks(family: Family, blocks: Any, given: ConfigDict) -> None:
    optional = family.any_blocks and family.mask_kind == "bidirectional"
    if optional or (family.mask_kind in ("block_causal", "causal_prefix")) == bool(blocks):
        return
    what = "take config.json from the original checkpoint"
    if given.get("block_length"):
        what = "leave it out"
    elif not blocks:
        what += ", or pass load(..., block_length=...)"
    raise CheckpointError(
        f"block_length is {blocks} for a model of family {family.name!r}, whose attention is "
        f"{ATTENTION[family.mask_kind]}; {what}"
    )


def _check_company(facts: Facts, text: Any) -> None:
    """Packed rows are rotated alike, whatever the longest is, and see all of themselves."""
    kind = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    most = getattr(text, "max_position_embeddings", None) or UNBOUNDED
    if kind == "longrope" or (kind == "dynamic" and facts.context_length > most):
        raise ConfigError(
            f"rope_type {kind!r} rotates a text as the longest of its batch wants it, which is no "
            "rotation of packed rows: use a checkpoint with another rope_scaling"
        )
    window = getattr(text, "sliding_window", None) or UNBOUNDED
    slides = "sliding_attention" in (getattr(text, "layer_types", None) or ["sliding_attention"])
    if slides and facts.sliding_window is None and window < facts.context_length:
        raise CheckpointError(
            f"config.json has layers that see {window} positions only, where whole texts are "
            f"attended to: pass load(..., context_length={window}), or use another checkpoint"
        )


def _check_range(facts: Facts, family: Family) -> None:
    if family.diffusion and facts.mask_token_id is None:
        raise CheckpointError(
            f"no mask token: a model of family {family.name!r} needs mask_token_id in config.json, "
            "a tokenizer with a mask token, or load(..., mask_token_id=...) with the id that its "
            "card or code names"
        )
    named = {
        "mask_token_id": () if facts.uniform and family.uniform else _ids(facts.mask_token_id),
        "eos_token_id": _ids(facts.eos_token_id), "stop_token_ids": facts.stop_token_ids,
        "pad_token_id": _ids(facts.pad_token_id), "expand_token_id": _ids(facts.expand_token_id),
    }  # fmt: skip
    for name, ids in named.items():
        outside = [i for i in ids if not 0 <= i < facts.vocab_size]
        if outside:
            raise CheckpointError(
                f"{name} {outside[0]} is outside the vocabulary of {facts.vocab_size} tokens; "
                f"correct config.json or pass load(..., {name}=...)"
            )


def _check_release(facts: Facts, family: Family, given: Mapping[str, Any]) -> None:
    release = family.releases.get(facts.vocab_size)
    for name, expected in (release.facts if release else {}).items():
        result = getattr(facts, name)
        if name not in given and result != expected:
            raise CheckpointError(
                f"{name} is {result} in this checkpoint, but {expected} in every published "
                f"{family.name} model with {facts.vocab_size} tokens; correct its files, or pass "
                f"load(..., {name}={result}) if it is meant"
            )
