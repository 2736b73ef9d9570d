"""Finding a checkpoint and reading its small files: hub ids, folders, bundled names."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

import huggingface_hub

from ..core.errors import CheckpointError, ConfigError, UnknownNameError, one_line, short
from .fields import GENERATION, check, check_config

BUNDLED = ("nano", "nano-ar")
SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model")
WEIGHTS = ("*.safetensors",)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: ``config`` is its ``config.json``, ``generation`` the content of
    ``generation_config.json`` (empty when absent).  ``name`` is what the user asked for."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    hub: str | None = None
    revision: str | None = None

    @property
    def bundled(self) -> bool:
        return self.name in BUNDLED

    def with_weights(self) -> Path:
        """The folder, after making sure that it holds safetensors (fetching them from the hub).

        Raises `CheckpointError` when there are none, in particular when there are only pickles.
        """
        if self.hub is not None:
            snapshot(self.hub, self.revision, WEIGHTS)
        if not any(self.folder.glob("*.safetensors")):
            pickles = sorted(each.name for each in self.folder.iterdir() if each.suffix in PICKLES)
            held = f"only pickles ({', '.join(pickles)})" if pickles else "no weights"
            raise CheckpointError(
                f"{self.folder} holds {held}, and only safetensors are loaded, because unpickling "
                "runs code; convert a trusted checkpoint once with "
                "safetensors.torch.save_file(torch.load(file, weights_only=True), "
                "'model.safetensors')"
            )
        return self.folder


def open_checkpoint(model: str | os.PathLike[str], revision: str | None = None) -> Checkpoint:
    """Locate ``model``: a bundled name, an existing folder, else a hub id.

    Weights are not fetched yet.  Raises `CheckpointError` when it cannot be found or its
    ``config.json`` cannot be read, and `UnknownNameError` for a misspelt bundled name.
    """
    name = _named(model)
    folder, hub = find(model, revision)
    config = read_json(folder / "config.json")
    if (folder / ADAPTER).is_file():  # transformers would put it on the network unasked
        raise CheckpointError(
            f"{folder} holds an adapter"
            + (": load its model with adapter=FOLDER" if config is None else
               f" beside a model: move {ADAPTER} to a folder of its own, for adapter=FOLDER")
        )  # fmt: skip
    if config is None:
        raise CheckpointError(f"{folder} has no config.json; copy it from the original checkpoint")
    check_config(config)
    generation = read_json(folder / "generation_config.json") or {}
    check(generation, GENERATION, "generation_config.json")
    place = folder.resolve()
    if place.parent.parent.name.startswith("models--"):  # of the hub's cache, behind a commit
        place = Path(place.parent.parent.name.replace("--", "/"))
    called = name if hub or name in BUNDLED else place.name
    return Checkpoint(called, folder, config, generation, hub, revision)


def _named(model: object) -> str:
    if not isinstance(model, str | os.PathLike):
        inner = ": of a wrapper pass the transformers model in it" * hasattr(model, "state_dict")
        raise ConfigError(
            f"expected a hub id, a folder or a bundled name, not {short(model)}{inner}"
        )
    return os.fspath(model)


def find(model: str | os.PathLike[str], revision: str | None = None) -> tuple[Path, str | None]:
    """The folder with the small files of ``model``, and its hub id if it came from there."""
    name = _named(model)
    if name in BUNDLED:
        folder = Path(str(resources.files("dllm"))) / "nano" / name
        if not folder.is_dir():
            raise CheckpointError(
                f"the bundled model {name!r} is not part of this installation; install a released "
                "wheel of dllm, or train it in a checkout: python -m examples.nano"
            )
        return folder, None
    path = os.path.expanduser(name)  # what can be no path is none, without an error
    if os.path.isdir(path):
        return Path(path), None
    if isinstance(model, os.PathLike) or os.path.exists(path) or looks_like_a_path(name):
        raise CheckpointError(
            f"there is no folder {name!r}; a checkpoint is a folder with config.json and "
            "safetensors, a hub id such as 'GSAI-ML/LLaDA-8B-Instruct', or 'nano'"
        )
    if "/" not in name and get_close_matches(name, BUNDLED, cutoff=0.75):
        raise UnknownNameError("model", name, BUNDLED)
    return snapshot(name, revision, SMALL_FILES), name


def snapshot(repo: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """The folder with the files of a hub repository that match, after fetching them."""
    try:
        wanted = list(patterns)
        return Path(
            huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=wanted)
        )
    except Exception as error:  # the client raises types of three libraries
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"{repo!r}{at} is neither a folder nor a bundled model ({', '.join(BUNDLED)}), and "
            f"fetching it from the Hugging Face hub failed ({type(error).__name__}); check the "
            "name, the connection and your access rights, or pass the path of a local copy"
        ) from error


def read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in ``file``, None when there is no such file.

    Raises `CheckpointError` when it cannot be read or holds something else.
    """
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(
            f"{file} is not valid JSON ({one_line(error, 120)}); download it again"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not hold a JSON object; download it again")
    return content


def looks_like_a_path(name: str) -> bool:
    """Whether ``name`` can be no hub id."""
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or "\\" in name
