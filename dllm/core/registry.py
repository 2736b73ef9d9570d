"""Names of things that third parties may add: one registry per kind.

A name resolves to a class.  Entry points of installed packages (groups ``dllm.samplers``,
``dllm.caches`` and ``dllm.drafters``) are looked at only when a name is unknown or a listing is
wanted, so that importing stays cheap.  One that is of no use is named in a warning and left out.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from .errors import ConfigError, UnknownNameError, one_line

T = TypeVar("T")


class Registry(Generic[T]):
    """``kind`` is what a name stands for, in the singular: it appears in error messages.  Entries
    are classes of ``base``.  ``elsewhere``: what others call an entry, and what to write here."""

    def __init__(
        self, kind: str, base: type = object, elsewhere: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.kind, self.base, self.elsewhere = kind, base, elsewhere
        self._entries: dict[str, type[T]] = {}
        self.version = 0  # counts what was registered
        self._plugins_loaded = False

    def register(self, name: str, **facts: object) -> Callable[[type[T]], type[T]]:
        """Class decorator: add the class under ``name`` and set ``facts`` on it."""

        def add(cls: type[T]) -> type[T]:
            if not name.isidentifier():
                raise ConfigError(f"{self.kind} name {name!r} is not an identifier like 'my_name'")
            self._check(cls)
            known, own = self._entries.get(name), vars(cls).get("name", name)
            if known is not None and not _again(known, cls):
                raise ConfigError(f"{self.kind} {name!r} exists already: choose another name")
            if own != name and self._entries.get(own) is cls:
                raise ConfigError(f"{cls.__name__} is the {self.kind} {own!r} already: call it so")
            for key, value in {"name": name, **facts}.items():
                setattr(cls, key, value)
            self._entries[name] = cls
            self.version += 1
            return cls

        return add

    def part(self, name: str, **facts: object) -> Callable[[Any], Any]:
        """As `register`, for a class that becomes a frozen dataclass unless it has its own
        ``__init__``."""

        def add(cls: Any) -> Any:
            self._check(cls)
            frozen = cls if "__init__" in vars(cls) else dataclass(frozen=True)(cls)
            return self.register(name, **facts)(frozen)

        return add

    def _check(self, cls: Any) -> None:
        if not (isinstance(cls, type) and issubclass(cls, self.base)):
            raise ConfigError(f"{cls!r:.80} is no subclass of {self.base.__name__}")

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._entries:
            self._load_plugins()
        if name not in self._entries:
            raise UnknownNameError(self.kind, name, self._entries, self.elsewhere.get(name))
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._load_plugins()
        return iter(self._entries)

    def _load_plugins(self) -> None:
        if not self._plugins_loaded:
            self._plugins_loaded = True
            for entry in entry_points(group=f"dllm.{self.kind}s"):
                self._load(entry)

    def _load(self, entry: EntryPoint) -> None:
        try:
            self.part(entry.name)(entry.load())
        except Exception as error:  # whatever the other package does when it is imported
            package = f" of package {entry.dist.name}" if entry.dist else ""
            warnings.warn(
                f"{self.kind} {entry.name!r} ({entry.value}){package} is left out: "
                f"{type(error).__name__}: {one_line(error)}",
                RuntimeWarning,
                stacklevel=4,
            )


def _again(known: type, cls: type) -> bool:
    """Whether ``cls`` is ``known`` made again, as a notebook does; no class of the library is."""
    kept = known.__module__ == cls.__module__ or not known.__module__.startswith("dllm.")
    return kept and known.__qualname__ == cls.__qualname__
