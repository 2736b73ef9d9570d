"""Names of things that third parties may add: one registry per kind.

A name resolves to a class.  Entry points of installed packages (group ``dllm.<kind>s``) are looked
at only when a name is unknown or a listing is wanted, so that importing stays cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from .errors import ConfigError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """``kind`` is what a name stands for, in the singular: it appears in error messages."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, type[T]] = {}
        self._plugins_loaded = False

    def register(self, name: str, **facts: object) -> Callable[[type[T]], type[T]]:
        """Class decorator: add the class under ``name`` and set ``facts`` on it."""

        def add(cls: type[T]) -> type[T]:
            if not name.isidentifier():
                raise ConfigError(f"{self.kind} name {name!r} is not an identifier like 'my_name'")
            known = self._entries.get(name)
            if known is not None and known.__qualname__ != cls.__qualname__:
                raise ConfigError(f"{self.kind} {name!r} exists already: choose another name")
            for key, value in {"name": name, **facts}.items():
                setattr(cls, key, value)
            self._entries[name] = cls
            return cls

        return add

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._entries:
            self._load_plugins()
        if name not in self._entries:
            raise UnknownNameError(self.kind, name, self._entries)
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._load_plugins()
        return iter(self._entries)

    def _load_plugins(self) -> None:
        if not self._plugins_loaded:
            self._plugins_loaded = True
            for entry in entry_points(group=f"dllm.{self.kind}s"):
                self.register(entry.name)(entry.load())
