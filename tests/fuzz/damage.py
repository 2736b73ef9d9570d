"""Folders that are damaged on purpose: what reads them says one sentence, and nothing else."""

import json
import random
import resource
import shutil
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dllm

MEMORY = 2 * 2**30  # bytes that a case may add to the process: a network that is allotted anyway
Fault = Callable[[Path, random.Random], str]
HOSTILE: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3.5, -0.0, 2**31, 2**40, 10**12, 10**30, float("nan"),
    float("inf"), "", "x", "3", "torch.bfloat16", "\ud800", "../../etc/passwd", [], [[]], [[1]],
    [1, 2], ["x"], [-1], {}, {"a": 1},
    {"rope_type": "yarn"}, {"type": "linear", "factor": "x"}, [None],
    {"quant_method": "bitsandbytes"}, {"weight_map": {}}, "x" * 10_000,
]  # fmt: skip


def rewrite(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    if isinstance(content, dict):
        change(content)
    file.write_text(json.dumps(content))


def drop_field(folder: Path, rng: random.Random) -> str:
    config = json.loads((folder / "config.json").read_text())
    name = rng.choice(list(config))
    rewrite(folder / "config.json", lambda c: c.pop(name))
    return f"config without {name}"


def index(folder: Path, rng: random.Random) -> str:
    """Weights in shards, and an index that may be wrong."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    right = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    broken: Any = rng.choice(
        [
            {"metadata": {}, "weight_map": right},
            {"metadata": rng.choice(HOSTILE), "weight_map": right},
            {"weight_map": right},
            {"metadata": {}, "weight_map": right | {next(iter(tensors)): rng.choice(HOSTILE)}},
            {"metadata": {}, "weight_map": rng.choice(HOSTILE)},
            {"metadata": {}, "weight_map": dict.fromkeys(tensors, "/etc/passwd")},
            {"metadata": {}, "weight_map": dict.fromkeys(tensors, "../model.safetensors")},
            {"metadata": {}, "weight_map": dict.fromkeys(tensors, "absent.safetensors")},
            rng.choice(HOSTILE),
        ]
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps(broken))
    return f"index {broken!r:.60}"


def text_damage(folder: Path, rng: random.Random) -> str:
    file = rng.choice(sorted(folder.glob("*.json")))
    text = rng.choice(
        ["", "[" * 100_000, "{" * 50_000, "null", "[]", "3", '"x"', "{", "\x00" * 9, '{"a": NaN}']
    )
    file.write_text(text)
    return f"{file.name} = {text!r:.30}"


def bytes_damage(folder: Path, rng: random.Random) -> str:
    file = rng.choice(sorted(f for f in folder.iterdir() if f.is_file()))
    content = bytearray(file.read_bytes())
    if not content:
        return "nothing"
    kind = rng.randrange(3)
    if kind == 0:
        content = content[: rng.randrange(len(content))]
    elif kind == 1:
        for _ in range(rng.randrange(1, 30)):
            content[rng.randrange(min(len(content), 4000))] = rng.randrange(256)
    else:
        content += rng.randbytes(50)
    file.write_bytes(content)
    return f"{file.name}: bytes, kind {kind}"


def header(folder: Path, rng: random.Random) -> str:
    """A header that says something else than the numbers behind it."""
    file = next(iter(sorted(folder.glob("*.safetensors"))), None)
    if file is None:
        return "nothing"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    entries = json.loads(content[8 : 8 + length])
    name = rng.choice([n for n in entries if n != "__metadata__"])
    key = rng.choice(["shape", "dtype", "data_offsets"])
    entries[name][key] = rng.choice([*HOSTILE, [2**40, 2**40], "F8_E4M3", "I64", [0, 2**50]])
    changed = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + length :])
    return f"header {name} {key}={entries[name][key]!r:.40}"


def tensors(folder: Path, rng: random.Random) -> str:
    file = next(iter(sorted(folder.glob("*.safetensors"))), None)
    if file is None:
        return "nothing"
    try:
        held = load_file(file)
    except Exception:
        return "nothing"  # damaged already
    name = rng.choice(sorted(held))
    kind = rng.choice(["drop", "rename", "narrow", "flat", "ints", "nan", "half", "more"])
    match kind:
        case "drop":
            held.pop(name)
        case "rename":
            held["other." + name] = held.pop(name)
        case "narrow":
            held[name] = held[name][: max(1, len(held[name]) - 1)].clone()
        case "flat":
            held[name] = held[name].flatten().clone()
        case "ints":
            held[name] = held[name].to(torch.int32)
        case "nan":
            held[name] = torch.full_like(held[name], float("nan"))
        case "half":
            held[name] = held[name].half()
        case "more":
            held["surplus"] = torch.zeros(3)
    save_file(held, file, metadata={"format": "pt"})
    return f"tensor {name}: {kind}"


def files(folder: Path, rng: random.Random) -> str:
    file = rng.choice(sorted(folder.iterdir()))
    if rng.random() < 0.5:
        file.unlink()
        return f"without {file.name}"
    file.unlink()
    file.mkdir()
    return f"{file.name} is a folder"


OF_FILES = (text_damage, bytes_damage, header, tensors, tensors, files)


def damage(
    folder: Path, rng: random.Random, faults: Sequence[Fault], counts: Sequence[int]
) -> list[str]:
    """As many faults as one of ``counts`` says; what they were."""
    done = []
    for _ in range(rng.choice(counts)):
        try:
            done.append(rng.choice(faults)(folder, rng))
        except Exception:  # of whatever the fault before it has broken
            done.append("a fault on top of a fault that it needs whole")
    return done


def works(read: Callable[[], None], case: Any) -> bool:
    """Whether ``read`` does.  Anything but one sentence in its place is a failure of the case."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        read()
        return True
    except dllm.DllmError as error:
        message = str(error)
        assert "\n" not in message and 20 < len(message) < 1500, (case, message)
        return False
    except AssertionError:
        raise
    except Exception as error:
        pytest.fail(f"{case}: {type(error).__name__}: {error!s:.300}")
    finally:
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        assert grown < MEMORY, (case, grown)


def of_each(seeds: Iterable[int], tmp_path: Path, check: Callable[[Path, int], bool]) -> list[bool]:
    """Which of the seeds' folders work."""
    results = []
    for seed in seeds:
        folder = tmp_path / str(seed)
        results.append(check(folder, seed))
        shutil.rmtree(folder)
    return results
