"""Any causal language model of transformers: not decoded by diffusion, but a verifier of drafts."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .family import Family

_CLASSES = (
    (names,) if isinstance(names, str) else names
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
)

AUTOREGRESSIVE = Family(
    name="autoregressive",
    architectures=tuple(sorted(name for names in _CLASSES for name in names)),
    logit_shift=1,
    mask_kind="causal",
)
