"""DiffusionGemma: canvases of random tokens, denoised behind a text that is read causally.

Prompt and finished canvases pass the layers as in a causal model, and their keys and values stay;
the open canvas sees them and all of itself.  Encoder and decoder of transformers' class are the
same layers but for a scalar each, so that one pass takes both: each position has its own scalar,
and those of the canvas begin with the self-conditioning module, which adds what the step before
expected there.  The modules are transformers'; its loop takes that expectation as logits over the
vocabulary only, hence the loop here.  Text only: the vision tower is not loaded.
"""

from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import DiffusionGemmaConfig, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.diffusion_gemma import modeling_diffusion_gemma as theirs

from .family import ConfigDict, Family, Published, demand, require
from .forwards import CACHE

TEXT_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "layer_types", "sliding_window", "rope_parameters",
    "num_experts", "top_k_experts", "moe_intermediate_size", "rms_norm_eps",
)  # fmt: skip


class Attention(theirs.DiffusionGemmaDecoderTextAttention):
    """Keys and values go to a cache that knows where, those of the canvas as well."""

    def append_to_cache(self, cache: Any, *states: torch.Tensor) -> Any:
        return cache.update(*states, self.layer_idx)


class Layer(theirs.DiffusionGemmaDecoderTextLayer):  # type: ignore[no-untyped-call]
    """A layer whose scalar is given per position."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = Attention(config, layer_idx)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor],
        scalar: torch.Tensor, **attention: Any,
    ) -> torch.Tensor:  # fmt: skip
        """``x`` (1, Q, D), ``scalar`` (Q, 1)."""
        attended, _ = self.self_attn(
            self.input_layernorm(x), position_embeddings=angles, attention_mask=None, **attention
        )
        x = x + self.post_attention_layernorm(attended)
        dense = self.mlp(self.pre_feedforward_layernorm(x))
        flat = x.flatten(0, 1)
        _, weights, chosen = self.router(flat)
        sparse = self.experts(self.pre_feedforward_layernorm_2(flat), chosen, weights).view_as(x)
        both = self.post_feedforward_layernorm_1(dense) + self.post_feedforward_layernorm_2(sparse)
        result: torch.Tensor = (x + self.post_feedforward_layernorm(both)) * scalar
        return result


class Scalar(nn.Module):
    """What is the encoder's own of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("layer_scalar", torch.ones(1))


class Decoder(nn.Module):
    """Embedding, layers, norms, under the names of transformers' decoder."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = theirs.DiffusionGemmaTextScaledWordEmbedding(
            config.vocab_size, size, config.pad_token_id, size**0.5
        )
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = theirs.DiffusionGemmaRMSNorm(size, eps=eps)
        self.rotary_emb = theirs.DiffusionGemmaTextRotaryEmbedding(config)
        self.self_conditioning = theirs.DiffusionGemmaSelfConditioning(config)


class TextModel(theirs.DiffusionGemmaPreTrainedModel):  # type: ignore[no-untyped-call]
    """Encoder and decoder as one network over packed positions."""

    def __init__(self, config: DiffusionGemmaConfig) -> None:
        super().__init__(config)
        text: Any = config.text_config
        if text._experts_implementation is None:
            # grouped products want rows of whole 16 bytes
            even = not (text.hidden_size % 8 or text.moe_intermediate_size % 8)
            text._experts_implementation = config._experts_implementation if even else "eager"
        own = nn.ModuleList(Scalar() for _ in range(text.num_hidden_layers))
        self.encoder = nn.ModuleDict({"language_model": nn.ModuleDict({"layers": own})})
        self.decoder = Decoder(text)
        self.kinds: list[str] = text.layer_types
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> Any:
        return self.decoder.embed_tokens

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor,
        open: torch.Tensor | None = None, soft: torch.Tensor | None = None,
        segments: Any = None, sliding: Any = None, watch: Any = None, **rest: Any,
    ) -> BaseModelOutput:  # fmt: skip
        """Final hidden states of ``input_ids`` (1, Q).

        ``open`` (n,) int64: which of them are of an open canvas; ``soft`` (n, D) the expected
        embeddings there, not scaled, zeros where none are known (None: nowhere).  ``segments``
        say what is attended to, ``sliding`` the same in layers of a sliding window.
        """
        decoder: Any = self.decoder
        x = decoder.embed_tokens(input_ids)
        within = torch.zeros(x.shape[1], 1, dtype=torch.bool, device=x.device)
        if open is not None and len(open):
            within[open] = True
            signal = torch.zeros_like(x[:, open]) if soft is None else soft.to(x.dtype)[None]
            signal = signal * decoder.embed_tokens.embed_scale.to(x.dtype)
            x = x.index_copy(1, open, decoder.self_conditioning(x[:, open], signal))
        angles = {kind: decoder.rotary_emb(x, position_ids, kind) for kind in {*self.kinds}}
        attended = {"full_attention": segments, "sliding_attention": sliding or segments}
        own: Any = self.encoder["language_model"]["layers"]  # type: ignore[index]
        for layer, scalar, kind in zip(decoder.layers, own, self.kinds, strict=True):
            scalars = (each.layer_scalar.to(within.device) for each in (layer, scalar))
            x = layer(
                x, angles[kind], torch.where(within, *scalars), segments=attended[kind],
                watch=watch, **{CACHE: rest.get(CACHE)},
            )  # fmt: skip
        return BaseModelOutput(last_hidden_state=decoder.norm(x))


class TextDiffusionGemma(theirs.DiffusionGemmaPreTrainedModel):  # type: ignore[no-untyped-call]
    """The text part of DiffusionGemma, with the weights under their published names."""

    config_class = DiffusionGemmaConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = {  # type: ignore[misc]
        "lm_head.weight": "model.decoder.embed_tokens.weight"
    }

    def __init__(self, config: DiffusionGemmaConfig) -> None:
        super().__init__(config)
        text: Any = config.text_config
        self.model = TextModel(config)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.final_logit_softcapping = text.final_logit_softcapping
        self.post_init()  # type: ignore[no-untyped-call]

    def get_output_embeddings(self) -> Any:
        return self.lm_head


def diffusion_gemma_config(config: ConfigDict) -> PreTrainedConfig:
    """transformers' config, of a ``config.json`` that states all that decoding depends on."""
    require(config, ("text_config", "canvas_length"), "DiffusionGemma")
    demand(config, {"tie_word_embeddings": True}, "DiffusionGemma")
    require(config["text_config"], TEXT_FIELDS, "DiffusionGemma")
    demand(config["text_config"], {"attention_bias": False}, "DiffusionGemma")
    known = {k: v for k, v in config.items() if k not in ("dllm", "dtype", "torch_dtype")}
    return cast(PreTrainedConfig, DiffusionGemmaConfig.from_dict(known))


DIFFUSION_GEMMA = Family(
    name="diffusion_gemma",
    architectures=("DiffusionGemmaForBlockDiffusion",),
    model_class=TextDiffusionGemma,
    to_native=diffusion_gemma_config,
    mask_kind="causal_prefix",
    block_field="canvas_length",
    uniform=True,
    self_conditioning=True,
    ignored_keys=(r"^model\.encoder\.(vision_tower|embed_vision)\.",),
    sampler="entropy_bound",
    sampler_fields=(
        "entropy_bound", "max_denoising_steps", "t_min", "t_max", "stability_threshold",
        "confidence_threshold",
    ),
    image_field="image_token_id",
    checkpoints=(Published("google/diffusiongemma-26B-A4B-it"),),
    verified="logits of transformers, 5e-5",
    note="Text only: a prompt with images is refused.",
)  # fmt: skip
