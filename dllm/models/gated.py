"""Autoregressive models that also fill in masks, by an adapter which acts on the masks only.

Decided tokens see the base weights and one another causally; a mask sees every decided token and
the masks on its left, and predicts the token after it, as every row does (I-DLM's R-ISD, arXiv
2604.11035).  `dllm train convert` makes the adapter, ``load(base, adapter=...)`` joins the two.
"""

from __future__ import annotations

from .family import Family, register_family

GATED = register_family(
    Family(
        name="gated",
        architectures=(),
        logit_shift=1,
        mask_kind="decided_first",
        verified="logits of decided tokens equal to the base model's, to the bit",
        note="Load with `load(base, adapter=...)`; made by `dllm train convert`.",
    )
)
