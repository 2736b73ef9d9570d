"""The headers of weight files: names, dtypes and shapes, read without the numbers.

They say how large the network can be, so a ``config.json`` that asks for something else is
noticed before anything is built or allotted.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from ..core.errors import CheckpointError, one_line, short
from .checkpoint import INDEX, SINGLE, Checkpoint, read_json
from .family import Family
from .quiet import quiet

PIECE = 2**24  # numbers looked at in one go
PACKED = 16  # numbers that one stored number can stand for, at most
NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64",
         "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}  # fmt: skip
LAYER = re.compile(r"\.(\d+)\.")


class Header(NamedTuple):
    """One tensor in a file."""

    dtype: str  # as safetensors names it: F32, BF16, ...
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of the checkpoint in ``folder``.

    Raises `CheckpointError` for an unreadable index, and files outside the folder or missing.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = read_json(folder / INDEX)
    if index is None:
        others = sorted(file.name for file in folder.glob("*.safetensors") if file.is_file())
        raise CheckpointError(
            f"{folder} holds neither {SINGLE} nor {INDEX}"
            + (f", but {', '.join(others[:3])}" if others else "")
            + "; complete the download, or rename the file"
        )
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{folder / INDEX} has no weight_map from weights to files; download it again"
        )
    if not isinstance(index.get("metadata"), dict):
        raise CheckpointError(f"{folder / INDEX} has no metadata object; download it again")
    for name in weight_map.values():
        plain = isinstance(name, str) and Path(name).name == name and "\\" not in name
        if not plain or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder / INDEX} names {name!r:.60}, which is no safetensors file of this "
                "folder; download it again"
            )
    files = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"the weights in {folder} are incomplete: {', '.join(missing[:3])} "
            f"{'is' if len(missing) == 1 else 'are'} missing; download them again"
        )
    return files


def read_headers(folder: Path) -> dict[str, Header]:
    """Every weight of the checkpoint by its name in the files.

    Raises `CheckpointError` when a file is truncated or corrupt, or two hold the same weight.
    """
    result: dict[str, Header] = {}
    for file in weight_files(folder):
        own = {}
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                part = opened.get_slice(name)
                own[name] = Header(part.get_dtype(), tuple(part.get_shape()))
        for name in sorted(own.keys() & result):
            raise CheckpointError(
                f"two weight files in {folder} hold {name}: take both from the original checkpoint"
            )
        result |= own
    return result


def read_tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and numbers of every tensor in a file.

    Raises `CheckpointError` when it is truncated or corrupt.
    """
    with _opened(file) as opened:
        for name in opened.keys():  # noqa: SIM118 (not a mapping)
            yield name, opened.get_tensor(name)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except Exception as error:  # safetensors and torch have types of their own
        raise CheckpointError(
            f"the weight file {file} is truncated or corrupt ({one_line(error)}); download it again"
        ) from error


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of the weights: that of ``config.json``, else of the first in the files that has
    one; "float32" where no file is here yet.  Floats of 8 bits, in which nothing computes, become
    "bfloat16".  Raises like `read_headers`."""
    named = checkpoint.config.get("torch_dtype") or checkpoint.config.get("dtype")
    if named is None and any(checkpoint.folder.glob("*.safetensors")):
        kinds = (header.dtype for header in read_headers(checkpoint.folder).values())
        named = next((NAMES[kind] for kind in kinds if kind in NAMES), None)
    name = str(named or "float32").removeprefix("torch.")
    return "bfloat16" if name.startswith("float8") else name


def check_headers(folder: Path, family: Family, config: PreTrainedConfig, official: bool) -> None:
    """Raise `CheckpointError` where ``config`` asks for another network than the files hold.

    Quantised checkpoints pack their weights: of those only the sizes are compared, roughly.
    """
    headers = read_headers(folder)
    text: Any = config.get_text_config()  # some pass their layers several times
    layers = getattr(text, "num_layers_per_stack", None) or getattr(text, "num_hidden_layers", None)
    numbers = [int(match[1]) for key in headers if (match := LAYER.search(key))]
    present = 1 + max(numbers) if numbers else len(headers)
    if isinstance(layers, int) and layers > present:
        raise incomplete(folder, f"config.json asks for {layers} layers, the files hold {present}")
    network = blueprint(family, config, folder.name)
    packed = getattr(config, "quantization_config", None) is not None
    tensors = network.state_dict()
    for key, header in headers.items() if not packed else ():
        wanted = tensors.get(family.native_key(key) if official else key)
        if wanted is None:
            continue
        if header.shape != tuple(wanted.shape):
            raise wrong_shape(key, folder, header.shape, wanted.shape)
        if wanted.is_floating_point() and "F" not in header.dtype:
            raise CheckpointError(
                f"{key} in {folder} holds {short(header.dtype)}, no floating-point numbers, and "
                "config.json names no quantisation; take both from the original checkpoint"
            )
    held = sum(prod(header.shape) for header in headers.values())
    shared = prod(network.get_input_embeddings().weight.shape)  # one matrix for both ends
    asked = sum(parameter.numel() for parameter in network.parameters())
    if asked - shared > held * (PACKED if packed else 1):
        raise incomplete(folder, f"config.json asks for {asked:,} numbers, the files hold {held:,}")


def incomplete(folder: Path, what: str) -> CheckpointError:
    """The error for files that do not hold the whole network."""
    return CheckpointError(
        f"weights are missing from {folder}: {what}; complete the download, or check that "
        "config.json belongs to these files"
    )


def wrong_shape(key: str, folder: Path, found: Iterable[int], wanted: Iterable[int]) -> Exception:
    """The error for a weight of another shape than the network's."""
    return CheckpointError(
        f"{key} in {folder} has shape {tuple(found)}, config.json asks for {tuple(wanted)}; check "
        "that they belong together"
    )


def blueprint(family: Family, config: PreTrainedConfig, name: str) -> Any:
    """The network that ``config`` describes: shapes without numbers.

    Raises `CheckpointError` when the sizes in ``config`` do not make a network.
    """
    try:
        with quiet(), torch.device("meta"):
            if family.model_class is None:
                from transformers import AutoModelForCausalLM as Auto  # knows every network

                return Auto.from_config(config)  # type: ignore[no-untyped-call]
            return family.model_class(config)
    except Exception as error:  # networks check their sizes in their own ways, or divide by them
        raise CheckpointError(
            f"the sizes in config.json of {name!r} make no network: {one_line(error)}"
        ) from error


def not_finite(folder: Path) -> Iterator[str]:
    """Names of the weights that hold NaN or infinity.  Reads every number once.

    Raises `CheckpointError` when a file cannot be read.
    """
    for file in weight_files(folder):
        yield from (name for name, tensor in read_tensors(file) if not is_finite(tensor))


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity."""
    if not tensor.is_floating_point():
        return True
    flat = tensor.flatten()
    if flat.dtype.itemsize == 1:  # 8-bit floats know no isfinite
        flat = flat.to(torch.float32)
    return all(bool(piece.isfinite().all()) for piece in torch.split(flat, PIECE))
