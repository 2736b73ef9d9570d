"""`load`: from a name to a model that is complete, checked and ready to decode."""

import os
import threading
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..core.errors import ConfigError
from .adapters import attach
from .adopt import Wanted, adopt, prepare
from .checkpoint import Checkpoint, open_checkpoint
from .facts import generation_defaults, read_facts
from .fields import FACTS, own_section
from .gguf import SUFFIX, read_gguf
from .headers import read_headers, stored_dtype
from .model import DiffusionModel
from .precision import auto_dtype, native_bfloat16
from .quantisation import check_device, of_config, read
from .quiet import quiet
from .reading import family_of, native_config
from .threads import choose_threads, set_threads
from .tokenizer import TokenizerSource, complete_tokenizer, resolve_tokenizer
from .weights import load_weights, resolve_dtype

MOST_NAMED = 2  # a verifier and a drafter
_NAMED: dict[Any, DiffusionModel] = {}
_NAMED_LOCK = threading.Lock()
Source = str | os.PathLike[str] | PreTrainedModel | DiffusionModel


def load(
    model: Source, *, dtype: str | torch.dtype = "auto", device: str | torch.device | None = None,
    device_map: Any = None, attn_implementation: str | None = None, quantization: Any = None,
    quantization_config: Any = None, revision: str | None = None, family: str | None = None,
    tokenizer: TokenizerSource = None, adapter: str | os.PathLike[str] | None = None,
    merge_adapter: bool = False, threads: int | None = None, **options: Any,
) -> DiffusionModel:  # fmt: skip
    """Load a diffusion language model, or an autoregressive one to verify with.

    Args:
        model: a hub id, a folder, a bundled name ("nano", "nano-ar"), a GGUF file of a LLaDA or
            Dream network, a loaded transformers model (changed in place: attention, eval mode), or
            a `DiffusionModel` (returned as is).
        dtype: "float32", "bfloat16", "float16", or one of these torch dtypes.  "auto": on a GPU as
            stored; on a CPU bfloat16 where the processor has it natively, else float32; networks
            of less than 50M parameters as stored, bundled ones float32 (docs/hardware.md).
        device: where to put the whole model, CPU by default, "auto" for CUDA where there is one;
            or ``device_map`` as in transformers.
        attn_implementation: "sdpa", "eager", "flex_attention", "flash_attention_2" or "_3";
            default "sdpa", for autoregressive models what transformers chose for them.
        quantization: "int8" or "int4", with settings as in "int4(group=32, embeddings=True)": the
            weights of linear layers in so many bits, on a CPU (docs/hardware.md).
        quantization_config: a transformers quantisation config.
        revision: branch, tag or commit of a hub id.
        family: name of a `Family`, when the checkpoint does not say it: plain Llama or Qwen2
            weights that were trained for diffusion.
        tokenizer: a tokenizer, or a folder or hub id that holds one, instead of the model's own;
            missing special tokens and the chat template are added to it.
        threads: CPU threads, for all networks of the process, as ``torch.set_num_threads``
            does it.  By default a layer of the network's size is timed once on a CPU, with one
            thread and with more, unless PyTorch or ``OMP_NUM_THREADS`` was told a number.
        adapter: folder or hub id of a low-rank adapter in peft's format, e.g. one that `dllm train`
            made; it is put on the network, with ``merge_adapter`` into its weights.
        **options: facts that the checkpoint does not state (``mask_token_id=...``, see `Facts`),
            and options of ``from_pretrained`` such as ``max_memory``.

    Access to the hub follows ``HF_TOKEN``, ``HF_HOME`` and ``HF_HUB_OFFLINE``.

    Raises:
        CheckpointError: it cannot be found, read, or loaded completely.  Remote code is never run.
        ConfigError: arguments that are wrong or do not fit together.
        UnknownNameError: a misspelt family, option, attention implementation or bundled name.
    """
    if threads is not None:
        set_threads(threads)
    if adapter is not None and quantization is not None:
        raise ConfigError(
            "an adapter is put on weights as they are: merge it, save the model, and load that "
            "with quantization="
        )
    if merge_adapter and adapter is None:
        raise ConfigError("merge_adapter needs an adapter: pass adapter=FOLDER")
    if isinstance(model, DiffusionModel):
        given = {"device": device, "device_map": device_map, "revision": revision,
                 "attn_implementation": attn_implementation, "family": family, **options,
                 "quantization_config": quantization_config, "tokenizer": tokenizer,
                 "quantization": quantization,
                 "dtype": None if dtype == "auto" else dtype}  # fmt: skip
        for name in (name for name, value in given.items() if value is not None):
            raise ConfigError(f"the model is loaded already, {name} has no effect: leave it out")
        if adapter is not None:
            attach(model.hf, model.family, adapter, merge_adapter)
        return model
    if "trust_remote_code" in options:
        raise ConfigError("remote code is never run; leave trust_remote_code out")
    device = resolve_device(device)
    how = None if quantization is None else read(quantization)
    if how is not None:
        if quantization_config is not None or device_map is not None:
            raise ConfigError(
                "quantization= is for the whole model on a CPU: leave quantization_config and "
                "device_map out"
            )
        check_device(device)
    given = {name: options.pop(name) for name in FACTS if options.get(name) is not None}
    options = {name: value for name, value in options.items() if name not in FACTS}
    wanted = Wanted(
        family, tokenizer, given, attn_implementation, how, resolve_dtype(dtype), device
    )
    with quiet():
        loaded = isinstance(model, PreTrainedModel)
        gguf = not loaded and str(model).endswith(SUFFIX)
        more = options or quantization_config is not None or device_map is not None or revision
        if more and (loaded or gguf):
            raise ConfigError(
                f"the model {'is loaded already' if loaded else 'is a GGUF file'}: revision, "
                "quantization_config, device_map and options of from_pretrained have no effect on "
                "it; leave them out"
            )
        if isinstance(model, PreTrainedModel):
            result = adopt(model, wanted)
        elif gguf:
            result = _from_gguf(Path(os.path.expanduser(model)), wanted)
        else:
            result = _from_files(
                open_checkpoint(model, revision), wanted, device_map=device_map,
                quantization_config=quantization_config, **options,
            )  # fmt: skip
        choose_threads(result.hf)
    if adapter is not None:
        attach(result.hf, result.family, adapter, merge_adapter)
    return result


def remembered(model: Source) -> DiffusionModel:
    """`load` for calls that are given a model by its name: the last `MOST_NAMED` of these stay in
    memory, so that a name given twice is loaded once, unless a file of its folder has changed.
    `load` itself makes a new network each time."""
    if not isinstance(model, str | os.PathLike):
        return load(model)
    path = os.path.expanduser(model)
    files: list[Any] = [*os.scandir(path)] if os.path.isdir(path) else [Path(path)]
    there = [file for file in files if os.path.exists(file)]
    key = str(model), *sorted((file.name, file.stat().st_mtime_ns) for file in there)
    with _NAMED_LOCK:
        known = _NAMED.pop(key, None) or load(model)
        _NAMED[key] = known  # is now the last one used
        while len(_NAMED) > MOST_NAMED:
            del _NAMED[next(iter(_NAMED))]
    return known


def resolve_device(device: str | torch.device | None) -> str | torch.device | None:
    """``device`` if the machine has it; what "auto" stands for here."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if device is not None:
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device {str(device)!r} cannot be used ({reason}); see dllm doctor"
        ) from error
    return device


def _from_files(checkpoint: Checkpoint, wanted: Wanted, **options: Any) -> DiffusionModel:
    raw = checkpoint.config
    family = family_of(checkpoint, wanted.family, wanted.given)
    config, official = native_config(checkpoint, family)
    tokenizer = resolve_tokenizer(wanted.tokenizer, family, checkpoint.folder)
    facts = read_facts(
        family, config, tokenizer, raw=raw, generation=checkpoint.generation, given=wanted.given,
        published=family.published(checkpoint.name),
    )  # fmt: skip
    complete_tokenizer(tokenizer, family, facts.mask_token_id, facts.vocab_size)
    if wanted.rounding is not None and getattr(config, "quantization_config", None):
        raise ConfigError(f"{checkpoint.name} is stored quantised: leave quantization out")
    folder, dtype = checkpoint.with_weights(), wanted.dtype
    if dtype == "auto":
        dtype = _auto_dtype(checkpoint, config, wanted.device, **options)
    hf = load_weights(folder, family, config, official=official, dtype=dtype,
                      device=wanted.device, **options)  # fmt: skip
    prepare(hf, family, facts.block_length, wanted)
    return DiffusionModel(
        hf, tokenizer, family, facts, checkpoint.name,
        generation_defaults(raw, checkpoint.generation, facts, family),
        raw if official else own_section(raw).get("official_config") or {},
    )  # fmt: skip


def _from_gguf(file: Path, wanted: Wanted) -> DiffusionModel:
    if wanted.rounding is not None:
        raise ConfigError(f"{file.name} says itself how it is quantised: leave quantization out")
    check_device(wanted.device)
    dtype = wanted.dtype
    if isinstance(dtype, str):
        dtype = torch.bfloat16 if native_bfloat16() else torch.float32
    network, family, stated = read_gguf(file, dtype)
    known = {**stated, **wanted.given}
    held = replace(wanted, family=wanted.family or family, given=known, dtype="auto", device=None)
    return replace(adopt(network, held), name=file.stem)


def _auto_dtype(
    checkpoint: Checkpoint, config: PreTrainedConfig, device: Any, device_map: Any,
    quantization_config: Any, **_: Any,
) -> str | torch.dtype:  # fmt: skip
    if checkpoint.bundled:
        return torch.float32  # stored in half precision to keep the package small
    stored_in = getattr(config, "quantization_config", None)
    foreign = stored_in is not None and of_config(stored_in) is None
    stored = stored_dtype(checkpoint)
    away = device_map is not None or torch.device(device or "cpu").type != "cpu"
    if quantization_config or foreign or away:
        return stored
    numbers = sum(prod(header.shape) for header in read_headers(checkpoint.folder).values())
    return auto_dtype(checkpoint.name, stored, numbers)
