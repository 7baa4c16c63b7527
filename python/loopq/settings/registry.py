"""Registries: tables from names to objects. Their errors list the known names.

A module that defines a system, a quantizer or a command registers it on import. A registry imports every module of its
package at its first use, so a new entry touches one file. A room of the package may have a package of the same name.
The registry imports its modules too. In this way a room adds its own commands to those of `loopq.commands`, and removes
them when it is removed.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from loopq.errors import ConfigError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of named objects of one kind ("system", "quantizer" in messages), filled by the modules of one package.

    Import registers the entries. For the package `loopq.x` the packages `loopq.ROOM.x` belong to it.

    Parameters
    ----------
    kind : str
        Kind of the objects, for messages.
    package : str
        Package whose modules register them.
    rooms : mapping of str to str, optional
        Room of each name that a removable room registers. Without the room the error about the name says so.
    removed : mapping of str to str, optional
        Names of the last release, and what to do instead. Their errors say it until the next release.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        *,
        rooms: Mapping[str, str] | None = None,
        removed: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.rooms, self.removed = rooms or {}, removed or {}
        self._package = package
        self._entries: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under `name`. A class gets it as its attribute `name`.

        Raises
        ------
        ConfigError
            Another object is registered under that name.
        """

        def enter(entry: T) -> T:
            if name in self._entries and self._entries[name] is not entry:
                raise ConfigError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            if isinstance(entry, type):
                entry.name = name  # type: ignore[attr-defined]  # declared by the bases of such classes
            return entry

        return enter

    def _load(self) -> None:
        if self._loaded:
            return
        for name in (self._package, *self._of_rooms()):
            package = importlib.import_module(name)
            for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
                importlib.import_module(f"{name}.{info.name}")
        self._loaded = True

    def _of_rooms(self) -> list[str]:
        """Find the packages in rooms that add entries. The search uses files, so it imports no room."""
        root, *tail = self._package.split(".")
        if tail[-1] == "sections":
            tail = tail[1:]  # of a guest, whose own room is not part of the name
        places = map(Path, importlib.import_module(root).__path__)
        rooms = {
            file.parents[len(tail)].name
            for p in places
            for file in p.glob("/".join(["*", *tail, "__init__.py"]))
        }
        names = [".".join([root, room, *tail]) for room in sorted(rooms)]
        return [name for name in names if name != self._package]

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        self._load()
        return sorted(self._entries)

    def __iter__(self) -> Iterator[tuple[str, T]]:
        self._load()
        return iter(sorted(self._entries.items()))

    def get(self, name: str) -> T:
        """Return the entry registered under `name`.

        Raises
        ------
        UnknownNameError
            There is no entry of this name. The message lists close matches and all names, or says what to do instead
            of an entry of the last release.
        """
        self._load()
        if name in self._entries:
            return self._entries[name]
        if name in self.removed:
            raise UnknownNameError(f"there is no {self.kind} {name} any more: {self.removed[name]}")
        if name in self.rooms:
            why = f"{self.kind} {name!r} needs the folder loopq/{self.rooms[name]}, which this installation lacks"
        else:
            why = f"unknown {self.kind} {name!r}{did_you_mean(name, self._entries)}"
        raise UnknownNameError(f"{why}; known: {', '.join(self.names()) or 'none'}")


def did_you_mean(name: str, known: Iterable[str], spelled: Mapping[str, str] | None = None) -> str:
    """Return a phrase with the known names most similar to an unknown one. It is empty if none is similar.

    `spelled` says how to write some of the names.
    """
    near = difflib.get_close_matches(name, list(known), n=3)
    near = [(spelled or {}).get(n, n) for n in near]
    return f" (did you mean {', '.join(near)}?)" if near else ""
