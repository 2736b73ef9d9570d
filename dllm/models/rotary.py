"""Attention layers that leave rotation to the buffer their keys go to.

The layers of transformers rotate, then hand the result to the cache: a dozen launches per layer,
which decide the time of a small step on a GPU.  Where the cache offers ``rotate_scatter`` the
layers of Llama, Mistral, Qwen2 and Qwen3 go through it instead, with one kernel and the same
numbers; with every other cache, or none, they run as they are.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from .attention import FUNCTIONS
from .forwards import CACHE, classes, replace_forwards


def rotate_in_cache(hf: PreTrainedModel) -> None:
    """Let the attention layers of ``hf`` use ``rotate_scatter``.  Changes them in place."""
    replace_forwards(hf, classes("Attention"), _forward)


def _forward(
    module: Any, hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None, **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The forward of such a layer: ``hidden_states`` (B, Q, D) to the same shape."""
    cache = rest.pop(CACHE, None)
    if not hasattr(cache, "rotate_scatter"):
        result: tuple[torch.Tensor, torch.Tensor | None] = type(module).forward(
            module, hidden_states, position_embeddings, attention_mask, cache, **rest
        )
        return result
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    q, k = module.q_proj(hidden_states).view(shape), module.k_proj(hidden_states).view(shape)
    if hasattr(module, "q_norm"):  # of Qwen3
        q, k = module.q_norm(q), module.k_norm(k)
    v = module.v_proj(hidden_states).view(shape)
    q, keys, values = cache.rotate_scatter(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *position_embeddings,
        module.layer_idx,
    )  # fmt: skip
    attended, weights = FUNCTIONS[module.config._attn_implementation](
        module, q, keys, values, attention_mask, scaling=module.scaling, **rest
    )
    return module.o_proj(attended.flatten(2)), weights
