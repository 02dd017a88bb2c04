"""Names that configs choose from, and files of users that add to them."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """What has a name in configs, by its name; in order of names.

    Args:
      what: one of its entries in a message, e.g. `credit scheme`.
      key: of the config, that names a file of the user's own, e.g. `credit.file`.
    """

    def __init__(self, what: str, key: str) -> None:
        self._what, self._key = what, key
        self._entries: dict[str, T] = {}
        self._files: dict[str, str | None] = {}

    def add(self, name: str, entry: T, definition: Callable[..., Any]) -> None:
        """Gives an entry its name. Raises ValueError if another `definition` has it."""
        file = inspect.getsourcefile(inspect.unwrap(definition))
        if name in self._entries:
            raise ValueError(f"{self._what} {name!r} is registered twice, in {self._files[name]} and in {file}")
        self._entries[name], self._files[name] = entry, file

    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def called(self, name: str) -> T:
        """The entry of a name that a config gives. Raises ValueError, which lists the names, if there is none."""
        if name not in self:
            raise ValueError(f"unknown {self._what} {name!r}; choose one of {', '.join(self)}")
        return self[name]

    def load(self, path: str) -> None:
        """Imports a user's Python file, which registers something; reading it again puts the new in place of the old.

        Raises:
          ValueError: there is no such file, it does not load, or it registers nothing.
        """
        path = os.path.abspath(os.path.expanduser(path))
        if not os.path.isfile(path):
            raise ValueError(f"{self._key}: {path}: no such file")
        spec = importlib.util.spec_from_file_location(f"agentr1_jax_user_{self._key.replace('.', '_')}", path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{self._key}: {path}: not a Python file; name it *.py")
        module = importlib.util.module_from_spec(spec)
        before = {name for name, file in self._files.items() if file != path}
        self._keep(before)
        sys.modules[spec.name] = module  # Where dataclasses of the file look for themselves.
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            self._keep(before)
            raise ValueError(f"{self._key}: {path}: {type(error).__name__}: {error}") from error
        added = self._entries.keys() - before
        self._files.update(dict.fromkeys(added, path))
        if not added:
            raise ValueError(f"{self._key}: {path} registers no {self._what}; decorate one with @register('its_name')")

    def _keep(self, names: set[str]) -> None:
        for name in self._entries.keys() - names:
            del self._entries[name], self._files[name]


def parse_call(text: str, key: str) -> tuple[str, list[str], dict[str, str]]:
    """A name with arguments as configs write it: `window(3)` is `("window", ["3"], {})`.

    Args:
      text: `name`, `name(value, ...)` or `name(key=value, ...)`.
      key: of the config, or the flag, for the message.

    Raises:
      ValueError: it reads otherwise.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", text)
    parts = [part.partition("=") for part in match[2].split(",")] if match and (match[2] or "").strip() else []
    values = [name.strip() for name, equals, _ in parts if not equals]
    named = {name.strip(): value.strip() for name, equals, value in parts if equals}
    whole = len(values) + len(named) == len(parts) and all([*values, *named, *named.values()])
    if not match or not whole:
        raise ValueError(f"{key}: cannot read {text!r}; write name, name(value) or name(key=value, ...)")
    return match[1], values, named
