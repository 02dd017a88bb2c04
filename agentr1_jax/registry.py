"""Names that configs choose from, and files of users that add to them."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Entries that configs choose by name; in order of names.

    Args:
      what: word for an entry in messages, e.g. `credit scheme`.
      key: key of the config that names a file of the user's own, e.g. `credit.file`.
    """

    def __init__(self, what: str, key: str) -> None:
        self._what, self._key = what, key
        self._entries: dict[str, T] = {}
        self._files: dict[str, str | None] = {}

    def add(self, name: str, entry: T, definition: Callable[..., Any]) -> None:
        """Add an entry under a name. Raises ValueError if another `definition` has the name."""
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

    def get_entry(self, name: str) -> T:
        """Return the entry of a name. Raises ValueError, which lists the names, if there is none."""
        if name not in self:
            raise ValueError(f"unknown {self._what} {name!r}; choose one of {', '.join(self)}")
        return self[name]

    def load(self, path: str) -> None:
        """Import a user's Python file, which registers entries; loading it again replaces its earlier entries.

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


Value = int | float | bool | str | None
"""Value of an argument in a config string."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A name with arguments, as config strings write it.

    Attributes:
      name: e.g. `window`.
      values: arguments without a name, in order.
      named: arguments with a name.
    """

    name: str
    values: tuple[Value, ...] = ()
    named: Mapping[str, Value] = dataclasses.field(default_factory=dict)

    def bind(self, parameters: Sequence[str]) -> dict[str, Value]:
        """Return all arguments by name. Raises ValueError if there are too many, an unknown one, or one is twice."""
        bound = dict(zip(parameters, self.values, strict=False))
        unknown = [name for name in self.named if name not in parameters or name in bound]
        if len(self.values) > len(parameters) or unknown:
            raise ValueError(f"{self.name} takes {', '.join(parameters) or 'no arguments'}")
        return bound | dict(self.named)


def parse_call(text: str, key: str) -> Call:
    """Parse `name`, `name(value, ...)` or `name(key=value, ...)`.

    A value is a number, `true`, `false`, `none`, a quoted text, or any other text without quotes, commas and brackets.

    Args:
      text: e.g. `window(3)` or `step_gae(lam=0.9)`.
      key: key of the config, or flag, for the message.

    Raises ValueError if the text reads otherwise.
    """
    call = _CALL.fullmatch(text)
    parts = [_ARGUMENT.fullmatch(part) for part in split_list(call["arguments"] or "")] if call else []
    named = {part["key"]: _parse_value(part["value"]) for part in parts if part and part["key"]}
    values = tuple(_parse_value(part["value"]) for part in parts if part and not part["key"])
    if call is None or len(values) + len(named) != len(parts):
        raise ValueError(f"{key}: cannot read {text!r}; write name, name(value) or name(key=value, ...)")
    return Call(call["name"], values, named)


def split_list(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes; an empty text has no parts."""
    parts, depth, quote, start = [], 0, "", 0
    for i, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]] if text.strip() else []


_CALL = re.compile(r"\s*(?P<name>\w+)\s*(?:\((?P<arguments>.*)\))?\s*")
_ARGUMENT = re.compile(r"\s*(?:(?P<key>[A-Za-z_]\w*)\s*=)?\s*(?P<value>'[^']*'|\"[^\"]*\"|[^'\"(),=]*[^'\"(),=\s])\s*")
_WORDS: Mapping[str, Value] = {"true": True, "false": False, "none": None}


def _parse_value(text: str) -> Value:
    if text[0] in "'\"":
        return text[1:-1]
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
