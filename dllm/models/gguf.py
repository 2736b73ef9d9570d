"""Checkpoints of llama.cpp: a GGUF file of a LLaDA or Dream network, without widening its numbers
where this library has a kernel for them.

    Q4_0, Q4_K            4 bits in groups of 32, as they are (scales rounded to bfloat16)
    Q8_0, Q5_*, Q6_K ...  8 bits with one scale per row, rounded again
    F32, F16, BF16        the dtype of the model; so are embeddings, norms and biases of any type

The file brings no tokenizer that transformers reads: pass the original's as ``tokenizer=``.
"""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..core.errors import CheckpointError, ConfigError, one_line, short
from ..kernels.mapped import release
from ..kernels.quantised import BLOCK, EVEN, QuantisedLinear, halves, quantise
from .family import get_family
from .fields import FACTS, MOST, check
from .headers import blueprint

GROUP = 32  # numbers that share a scale in Q4_0 and Q4_K
SUFFIX = ".gguf"
FAMILIES = {"llada": "llada", "dream": "dream"}  # general.architecture -> family
PERMUTED = ("llada",)  # rows of queries and keys lie as llama.cpp's rotation wants them
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
ONLY = {"rope.scaling.type": "none", "attention.causal": False}
SIZES = ("rope.dimension_count", "attention.key_length", "attention.value_length")  # of a head
LOG = logging.getLogger("dllm")


def open_gguf(file: Path) -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    """The network of ``file`` without its numbers, the name of its family, and fields and tensors.

    Raises `CheckpointError` for other architectures and files that cannot be read, and
    `ConfigError` when the package gguf is missing.
    """
    if not file.is_file():
        raise CheckpointError(f"there is no file {str(file)!r}")
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(f"{file.name} needs the package gguf: pip install gguf") from error
    try:
        reader = gguf.GGUFReader(file, "c")  # pages are copied where somebody writes
    except Exception as error:  # whatever numpy makes of bytes that are no such file
        raise CheckpointError(f"{file} is no complete GGUF file ({one_line(error)})") from error
    fields = {name: field.contents() for name, field in reader.fields.items()
              if not name.startswith("tokenizer.ggml.") or name.endswith("_id")}  # fmt: skip
    parts = fields.get("split.count", 1)
    if parts != 1:
        raise CheckpointError(
            f"{file.name} is one of {short(parts)} parts: join them with llama-gguf-split --merge"
        )
    kind = fields.get("general.architecture")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"{file.name} holds a network of architecture {short(kind)}; GGUF files are read of "
            f"{', '.join(FAMILIES)}: load others with transformers and pass the network, "
            "dllm.load(AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME)), or load the "
            "original safetensors with quantization='int8' or 'int4'"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    try:
        config = _config(kind, fields, tensors)
    except KeyError as error:
        raise CheckpointError(f"{file.name} lacks {one_line(error)}: download it again") from error
    except ValueError as error:
        raise CheckpointError(f"{file.name} is damaged ({error}): download it again") from error
    family = FAMILIES[kind]
    return blueprint(get_family(family), config, file.name), family, fields, tensors


def held_bytes(network: Any, tensors: dict[str, Any], width: int) -> int:
    """Bytes of the weights once they are loaded, ``width`` for each number that is not rounded."""
    held = 0
    for tensor in tensors.values():
        inner, _, attribute = _native(tensor.name).rpartition(".")
        bits = _bits(tensor, network.get_submodule(inner), attribute)
        size = int(np.prod(tensor.shape))
        scales = {4: 2 * size // GROUP, 8: int(tensor.shape[-1])}
        held += size * bits // 8 + scales.get(bits, size) * width
    return held


def read_gguf(file: Path, dtype: torch.dtype) -> tuple[Any, str, dict[str, Any]]:
    """The network in ``file``, its family's name, and stated facts; raises like `open_gguf`."""
    network, family, fields, tensors = open_gguf(file)
    _fill(network, family, tensors, dtype, file.name)
    names = ("mask_token_id", "eos_token_id", "bos_token_id", "padding_token_id")
    ids = {name.replace("padding", "pad"): fields.get(f"tokenizer.ggml.{name}") for name in names}
    shift = fields.get("diffusion.shift_logits")
    ids["logit_shift"] = int(shift) if isinstance(shift, bool) else shift
    check(ids, FACTS, file.name)
    return network, family, {name: v for name, v in ids.items() if v is not None}


def _config(kind: str, fields: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """What the file states of its network.  Raises `ValueError` where its tensors say otherwise,
    before anything of that size is built."""

    def stated(name: str, *otherwise: float) -> float:
        whole = f"{kind}.{name}"
        value = fields.get(whole, *otherwise) if otherwise else fields[whole]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MOST:
            raise ValueError(f"{whole} is {short(value)}")
        return value

    network: Any = get_family(FAMILIES[kind]).model_class
    heads, blocks = int(stated("attention.head_count")), int(stated("block_count"))
    groups, width = int(stated("attention.head_count_kv", heads)), int(stated("embedding_length"))
    embedding = [int(size) for size in tensors["token_embd.weight"].shape]
    if len(embedding) != 2 or embedding[0] != width:
        raise ValueError(f"embeddings of shape {embedding} for a width of {width}")
    if width % (2 * heads) or heads % groups:
        raise ValueError(f"{heads} heads, {groups} of keys, for a width of {width}")
    for name, known in (*ONLY.items(), *dict.fromkeys(SIZES, width // heads).items()):
        value = fields.get(f"{kind}.{name}", known)
        if value != known:
            raise CheckpointError(
                f"{kind}.{name} is {short(value)}; GGUF files are read with {known!r} only: load "
                "the original safetensors"
            )
    there = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if there != {*map(str, range(len(there)))} or blocks != len(there):
        raise ValueError(f"{len(there)} layers are there, {blocks} stated")
    return network.config_class(
        vocab_size=embedding[1],
        hidden_size=width,
        intermediate_size=int(stated("feed_forward_length")),
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=int(stated("context_length")),
        rms_norm_eps=stated("attention.layer_norm_rms_epsilon"),
        rope_parameters={
            "rope_type": "default", "rope_theta": stated("rope.freq_base", 1e4),
        },
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def _fill(network: Any, kind: str, tensors: dict[str, Any], dtype: torch.dtype, name: str) -> None:
    """Give the layers of ``network`` their numbers; every tensor has to find its place."""
    wanted = {*network.state_dict()}
    if network.config.tie_word_embeddings:
        wanted.discard("lm_head.weight")
    done: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.name == "rope_freqs.weight":
            continue
        key = _native(tensor.name)
        if key not in wanted:
            raise CheckpointError(f"{tensor.name} in {name} has no place in a {kind} network")
        wanted.discard(key)
        inner, _, attribute = key.rpartition(".")
        shape = [int(size) for size in reversed(tensor.shape)]
        if shape != [*network.get_parameter(key).shape]:
            raise CheckpointError(
                f"{tensor.name} in {name} has the shape {shape}, its network another: download it "
                "again"
            )
        order = None
        if kind in PERMUTED and inner.endswith(("q_proj", "k_proj")):
            order = _order(network.config, inner.endswith("q_proj"))
        layer = network.get_submodule(inner)
        stored = tensor.tensor_type.name
        if bits := _bits(tensor, layer, attribute):
            network.set_submodule(inner, _rounded(tensor, layer, bits, dtype, order))
            done[f"{stored} as int{bits}"] += 1
            release(torch.from_numpy(tensor.data))
            continue
        value = _plain(tensor, stored).to(dtype)
        value = value if order is None else value[order]
        setattr(layer, attribute, nn.Parameter(value, requires_grad=False))
        if stored not in PLAIN:
            done[f"{stored} widened to {str(dtype)[6:]}"] += 1
    if wanted:
        raise CheckpointError(f"{name} lacks {', '.join(sorted(wanted)[:3])}: download it again")
    network.tie_weights()
    network.model.rotary_emb = type(network.model.rotary_emb)(config=network.config)
    LOG.info("%s: %s", name, ", ".join(f"{n} tensors {how}" for how, n in done.items()))


PLAIN = ("F32", "F16", "BF16")


def _native(name: str) -> str:
    """The name of a tensor in the class of transformers; empty if there is none."""
    if name.startswith("blk."):
        _, layer, part, kind = [*name.split(".", 3), "", "", ""][:4]
        return f"model.layers.{layer}.{INNER[part]}.{kind}" if part in INNER else ""
    part, _, kind = name.partition(".")
    return f"{OUTER[part]}.{kind}" if part in OUTER else ""


def _order(config: Any, queries: bool) -> torch.Tensor:
    """Rows of queries or keys in the order of transformers: halves, not pairs."""
    heads = config.num_attention_heads if queries else config.num_key_value_heads
    size = config.hidden_size // config.num_attention_heads
    return torch.arange(heads * size).view(heads, size // 2, 2).transpose(1, 2).flatten()


def _plain(tensor: Any, stored: str) -> torch.Tensor:
    """Its numbers in the shape of the network, those of half precision as they lie in the file."""
    if stored == "BF16":
        return torch.from_numpy(tensor.data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(tensor.data if stored == "F16" else _numbers(tensor))


def _numbers(tensor: Any) -> np.ndarray[Any, Any]:
    """Its numbers in float32, in the shape of the network."""
    import gguf

    try:
        result: np.ndarray[Any, Any] = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{tensor.name} is stored in {tensor.tensor_type.name}, which the package gguf does "
            "not decode: take a file in another type, such as Q8_0"
        ) from error
    return result.astype(np.float32, copy=False)


def _bits(tensor: Any, layer: Any, attribute: str) -> int:
    """8 or 4 where a tensor becomes a rounded layer, 0 where it is widened."""
    stored = tensor.tensor_type.name
    if attribute != "weight" or not isinstance(layer, nn.Linear) or stored in PLAIN:
        return 0
    outputs, inputs = layer.weight.shape
    if stored in ("Q4_0", "Q4_K") and outputs % BLOCK == 0 and inputs % GROUP == 0:
        return 4
    return 8 if inputs % EVEN == 0 else 0


def _rounded(
    tensor: Any, layer: nn.Linear, bits: int, dtype: torch.dtype, order: torch.Tensor | None
) -> QuantisedLinear:
    """The layer with the numbers of the file."""
    if bits == 4:
        read = _q4_0 if tensor.tensor_type.name == "Q4_0" else _q4_k
        parts = read(tensor.data, len(layer.weight))
    else:
        parts = quantise(torch.from_numpy(_numbers(tensor)), 8)
    result = QuantisedLinear.like(layer, bits, GROUP if bits == 4 else 0, dtype)
    for name, value in parts.items():
        value = value if order is None else value[order]
        setattr(result, name, value if name == "numbers" else value.to(dtype))
    result.bias = layer.bias
    return result


def _q4_0(data: np.ndarray[Any, Any], outputs: int) -> dict[str, torch.Tensor]:
    """Blocks of 32: a scale in float16 and 16 bytes, the first half of the numbers below."""
    blocks = torch.from_numpy(data).view(outputs, -1, 18)
    scale = blocks[..., :2].contiguous().view(torch.float16)[..., 0].float()
    numbers = torch.cat((blocks[..., 2:] & 15, blocks[..., 2:] >> 4), 2)
    return {"numbers": halves(numbers.flatten(1)), "scale": scale, "zero": torch.zeros_like(scale)}


def _q4_k(data: np.ndarray[Any, Any], outputs: int) -> dict[str, torch.Tensor]:
    """Blocks of 256: two scales in float16 and, for eight groups of 32, a factor of 6 bits for each
    of them; w = d * factor * q - dmin * other."""
    blocks = torch.from_numpy(data).view(outputs, -1, 144)
    both = blocks[..., :4].contiguous().view(torch.float16).float()
    packed, held = blocks[..., 4:16], blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    factor = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), -1).float()
    other = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), -1).float()
    scale = (both[..., :1] * factor).flatten(1).bfloat16().float()
    least = (both[..., 1:] * other).flatten(1)
    numbers = torch.stack((held & 15, held >> 4), 3).flatten(1)
    return {"numbers": halves(numbers), "scale": scale, "zero": 8 * scale - least}
