"""A2D: autoregressive networks that were trained on to be diffusion models, unchanged otherwise.

Llama, Qwen2 and Qwen3 under plain names, without a causal mask and without a shift (dLLM, arXiv
2602.22661; OPDLM, arXiv 2606.06712).  Nothing in a checkpoint says whether it attends to the whole
text or in blocks: that is known of the published ones, and said with ``block_length=`` for others.
"""

from dataclasses import replace
from functools import partial

from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from .family import Family, Published
from .native import native

A2D_LLAMA = Family(
    name="a2d_llama",
    architectures=("A2DLlamaLMHeadModel",),
    model_class=LlamaForCausalLM,
    to_native=partial(native, kind=LlamaForCausalLM, name="A2D Llama"),
    any_blocks=True,
    end_of_turn="<|eot_id|>",
    verified="logits of official code, within 5e-6",
)
A2D_QWEN2 = Family(
    name="a2d_qwen2",
    architectures=("A2DQwen2LMHeadModel",),
    model_class=Qwen2ForCausalLM,
    to_native=partial(native, kind=Qwen2ForCausalLM, name="A2D Qwen2"),
    any_blocks=True,
    mask_token="<|mask|>",
    end_of_turn="<|im_end|>",
    tokenizer_class="Qwen2Tokenizer",
    checkpoints=(
        Published("dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1"),
        Published("dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1", block_length=32),
    ),
)
A2D_QWEN3 = replace(
    A2D_QWEN2,
    name="a2d_qwen3",
    architectures=("A2DQwen3LMHeadModel",),
    model_class=Qwen3ForCausalLM,
    to_native=partial(native, kind=Qwen3ForCausalLM, name="A2D Qwen3"),
    thinking=False,
    checkpoints=(
        Published("dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", "Apache-2.0"),
        Published("dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1", "Apache-2.0", block_length=32),
        *(Published(f"divelab/OPDLM-{size}B", block_length=4) for size in (0.6, 1.7, 4, 8)),
    ),
    verified="logits of official code, equal, whole text and blocks",
    note="A copy in another folder needs `block_length=` where the table has one.  Blocks count "
    "from position 0, as in training; the BD3LM sampler counts them from the prompt's end.",
)
