"""Reading weights into a transformers class, completely or not at all."""

import importlib.util
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel

from ..core.errors import CheckpointError, ConfigError, UnknownNameError, one_line
from .family import Family
from .fields import FACTS
from .headers import check_headers, incomplete, wrong_shape
from .quiet import logging

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ARGUMENTS = ("dtype", "device", "device_map", "attn_implementation", "quantization_config",
             "revision", "family", "tokenizer")  # fmt: skip
OPTIONS = ("max_memory", "offload_folder", "offload_buffers", "distributed_config", "tp_plan",
           "use_kernels", "kernel_config", "experts_implementation", "disable_mmap")  # fmt: skip
WORTH_A_BAR = 2**30  # bytes of weights from which loading takes long enough to show progress


def resolve_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """A torch dtype, or "auto".  Raises `ConfigError` for anything else than a float dtype."""
    resolved = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if resolved == "auto" or resolved in DTYPES.values():
        return resolved
    raise ConfigError(f"dtype is 'auto', {', '.join(map(repr, DTYPES))}, not {dtype!r}")


ELSEWHERE = {  # what other libraries call it, and what to write here
    "load_in_8bit": "quantization='int8'", "load_in_4bit": "quantization='int4'",
    "torch_dtype": "dtype", "precision": "dtype", "model_max_length": "max_new_tokens of a call",
    "token": "the variable HF_TOKEN", "cache_dir": "the variable HF_HOME",
    "local_files_only": "the variable HF_HUB_OFFLINE=1",
}  # fmt: skip


def load_weights(
    folder: Path, family: Family, config: PreTrainedConfig, *, official: bool,
    dtype: str | torch.dtype, device: str | torch.device | None, device_map: Any,
    quantization_config: Any, **options: Any,
) -> PreTrainedModel:  # fmt: skip
    """The network in eval mode.

    ``official`` says whether the files use the family's official names.  Raises `CheckpointError`
    unless every weight of the network is in the files, nothing else is, and all shapes agree.
    """
    if device is not None and device_map is not None:
        raise ConfigError("give device or device_map, not both")
    moved = device is not None and importlib.util.find_spec("accelerate") is None
    if device is not None and not moved:
        device_map = {"": torch.device(device)}
    for name in options:
        if name not in OPTIONS:
            known = (*ARGUMENTS, *FACTS, *OPTIONS)
            raise UnknownNameError("option", name, known, ELSEWHERE.get(name))
    stored: Any = getattr(config, "quantization_config", None)
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    elif stored and stored.get("quant_method") == "compressed-tensors":
        stored["dequantize"] = True  # else by the first call of the whole network: there is none
    cls: Any = family.model_class or transformers.AutoModelForCausalLM
    check_headers(folder, family, config, official)
    try:
        with _bar(folder):
            hf, report = cls.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                device_map=device_map,
                key_mapping=dict(family.key_map) if official else None,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # so that they are reported; `_check` refuses them
                output_loading_info=True,
                local_files_only=True,
                **options,
            )
    except (SafetensorError, OSError, EOFError) as error:
        raise CheckpointError(
            f"the weights in {folder} cannot be read ({one_line(error)}); download them again"
        ) from error
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:  # of what a quantisation or an attention stands on
        raise ConfigError(f"loading {folder} needs a package: {one_line(error)}") from error
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} could not be loaded ({one_line(error)}); check that config.json belongs to "
            "these files"
        ) from error
    _check(folder, family, report, official)
    if stored and getattr(hf, "hf_quantizer", None) is None:
        for weight in hf.parameters():  # widened as it was read, beside others that stay as stored
            weight.data = weight.data.to(hf.config.dtype)
    return cast(PreTrainedModel, hf.to(device) if moved else hf)


def _check(folder: Path, family: Family, report: dict[str, Any], official: bool) -> None:
    def listing(keys: Iterable[str]) -> str:
        names = sorted(family.official_key(key) if official else key for key in keys)
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    surplus = [
        key for key in report["unexpected_keys"]
        if not any(re.search(pattern, key) for pattern in family.ignored_keys)
    ]  # fmt: skip
    if report["missing_keys"]:
        raise incomplete(folder, listing(report["missing_keys"]))
    if surplus:
        raise CheckpointError(
            f"weights in {folder} have no place in a {family.name} network: "
            f"{', '.join(sorted(surplus)[:3])}; check that config.json belongs to these files"
        )
    if report["mismatched_keys"]:
        key, result, wanted = min(report["mismatched_keys"])
        raise wrong_shape(listing([key]), folder, result, wanted)
    if report["error_msgs"]:
        raise CheckpointError(f"{folder} could not be loaded: {report['error_msgs'][0]:.300}")


@contextmanager
def _bar(folder: Path) -> Iterator[None]:
    """Without a progress bar when loading takes no time."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    hidden = size < WORTH_A_BAR and logging.is_progress_bar_enabled()
    if hidden:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hidden:
            logging.enable_progress_bar()
