"""Dream: a Qwen2 network without a causal mask that kept the shifted head.

Dream 7B, arXiv 2508.15487.  Dream-Coder, DiffuCoder and the fine-tunes of them share the class.
The head predicts the *next* position: position ``i`` is read from ``logits[i - 1]``.  DreamOn
(arXiv 2602.01326) is such a fine-tune, with a token that asks for another mask.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedConfig, Qwen2ForCausalLM

from .family import Family, Published, Release
from .native import FIELDS, native

CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def to_official(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of an official ``config.json`` that describe this Qwen2 network."""
    c: Any = config
    rope = dict(c.rope_parameters)
    theta = rope.pop("rope_theta")
    scaled = rope.get("rope_type", "default") != "default"
    return {name: getattr(c, name) for name in (*FIELDS, "eos_token_id")} | {
        "architectures": ["DreamModel"], "model_type": "Dream", "rope_theta": theta,
        "rope_scaling": rope if scaled else None, "use_sliding_window": False,
        "sliding_window": None, "initializer_range": c.initializer_range,
        "attention_dropout": c.attention_dropout,
    }  # fmt: skip


DREAM = Family(
    name="dream",
    architectures=("DreamModel",),
    model_class=Qwen2ForCausalLM,
    to_native=partial(
        native, kind=Qwen2ForCausalLM, name="Dream", required=("eos_token_id", "mask_token_id")
    ),
    to_official=to_official,
    logit_shift=1,
    score_source="tempered",
    mask_token="<|mask|>",
    expand_token="<|expand|>",
    end_of_turn="<|im_end|>",
    tokenizer_class="Qwen2Tokenizer",
    chat_template=CHAT_TEMPLATE,
    releases={
        152064: Release(
            facts={"mask_token_id": 151666, "eos_token_id": 151643, "pad_token_id": 151643},
            tokens={
                "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645,
                "<|beginoftext|>": 151665, "<|mask|>": 151666,
            },
        )
    },
    checkpoints=(
        *(Published(f"Dream-org/Dream-{kind}-7B", "Apache-2.0")
          for kind in ("v0-Base", "v0-Instruct", "Coder-v0-Base", "Coder-v0-Instruct")),
        *(Published(f"apple/DiffuCoder-7B-{kind}", "Apple AMLR")
          for kind in ("Base", "Instruct", "cpGRPO")),
        Published("Zigeng/dParallel_Dream_7B_Instruct"),
        Published("d3LLM/d3LLM_Dream"), Published("d3LLM/d3LLM_Dream_Coder"),
    ),
    verified="logits and decoding traces of official code",
)  # fmt: skip

DREAMON = replace(
    DREAM,
    name="dreamon",
    architectures=("DreamOnModel", "DreamModel"),
    where={"expand_token_id": None},
    checkpoints=(Published("Dream-org/DreamOn-v0-7B", "Apache-2.0"),),
    verified="the rules of official code",
    note='Read where `config.json` has an `expand_token_id`, or with `family="dreamon"`; '
    'decoded as published with `sampler="dreamon"`.',
)
