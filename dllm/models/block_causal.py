"""Models whose attention is causal between blocks and bidirectional inside: SDAR, Fast-dLLM v2.

SDAR (arXiv 2510.06303; TraDo shares the class) is a Qwen3 network that predicts in place;
Fast-dLLM v2 (arXiv 2509.26328) is a Qwen2 network with the shifted head of its ancestor.  Blocks
are counted from position 0: the end of a prompt shares its block with the answer's beginning.
"""

from functools import partial

from transformers import Qwen2ForCausalLM, Qwen3ForCausalLM

from .family import Family, Published, Release
from .native import native

SDAR = Family(
    name="sdar",
    architectures=("SDARForCausalLM",),
    model_class=Qwen3ForCausalLM,
    to_native=partial(native, kind=Qwen3ForCausalLM, name="SDAR", required=("eos_token_id",)),
    score_source="tempered",
    k_first=True,
    mask_kind="block_causal",
    block_field="block_size",
    end_of_turn="<|im_end|>",
    tokenizer_class="Qwen2Tokenizer",
    releases={151936: Release(facts={"mask_token_id": 151669})},
    checkpoints=(
        *(Published(f"JetLM/SDAR-{size}-Chat", block_length=4) for size in ("1.7B", "4B", "8B")),
        Published("Gen-Verse/TraDo-4B-Instruct", "MIT", 4),
        Published("Gen-Verse/TraDo-8B-Instruct", "MIT", 4),
        Published("Gen-Verse/TraDo-8B-Thinking", "MIT", 4),
    ),
    verified="logits of official code, equal",
)
FAST_DLLM_V2 = Family(
    name="fast_dllm_v2",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    model_class=Qwen2ForCausalLM,
    to_native=partial(
        native, kind=Qwen2ForCausalLM, name="Fast-dLLM v2", required=("eos_token_id", "bd_size")
    ),
    logit_shift=1,
    score_source="tempered",
    mask_kind="block_causal",
    block_field="bd_size",
    mask_token="|<MASK>|",
    end_of_turn="<|im_end|>",
    tokenizer_class="Qwen2Tokenizer",
    releases=dict.fromkeys((151936, 152064), Release(facts={"mask_token_id": 151665})),
    checkpoints=(
        Published("Efficient-Large-Model/Fast_dLLM_v2_1.5B", "Apache-2.0"),
        Published("Efficient-Large-Model/Fast_dLLM_v2_7B", "Apache-2.0"),
    ),
    verified="logits of official code, within 5e-6",
    note="Its own loop commits a block's first token with the pass that keeps the block before.",
)
