"""Names that configs choose from, and files of users that add to them."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from absl import logging

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Entries that configs choose by name; in order of names.

    Args:
      what: word for an entry in messages, e.g. `credit scheme`.
      key: key of the config that names a file of the user's own, e.g. `credit.file`.
    """

    _registries: ClassVar[list[Registry[Any]]] = []

    def __init__(self, what: str, key: str) -> None:
        self._what, self._key = what, key
        self._entries: dict[str, T] = {}
        self._files: dict[str, str | None] = {}
        self._registries.append(self)

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

        The file may import those beside it; see `import_file`. One file may be loaded by several registries.

        Raises:
          ValueError: there is no such file, it does not load, or it registers nothing.
        """
        path = os.path.abspath(os.path.expanduser(path))
        if not os.path.isfile(path):
            raise ValueError(f"{self._key}: {path}: no such file")
        self._drop(path)
        before, modules = [set(registry) for registry in self._registries], set(sys.modules)
        try:
            import_file(path)
        except Exception as error:
            for registry, names in zip(self._registries, before, strict=False):
                registry._keep(names)
            raise ValueError(f"{self._key}: {path}: {type(error).__name__}: {error}") from error
        folder = os.path.dirname(path)
        ours = {
            x.__file__ for name, x in sys.modules.items() if name not in modules and name.startswith("agentr1_jax.")
        }
        for registry, names in zip(self._registries, before, strict=False):
            for name in registry._entries.keys() - names:
                # What a neighbour or a module of ours registers is its own: the next load does not execute it again.
                file = registry._files[name]
                if os.path.dirname(file or "") != folder and file not in ours:
                    registry._files[name] = path
        if not any(os.path.dirname(file or "") == folder for file in self._files.values()):
            raise ValueError(f"{self._key}: {path} registers no {self._what}; decorate one with @register('its_name')")

    def _drop(self, path: str) -> None:
        """Forget what a file has registered, here and in all other registries."""
        for registry in self._registries:
            registry._keep({name for name, file in registry._files.items() if file != path})

    def _keep(self, names: set[str]) -> None:
        for name in self._entries.keys() - names:
            del self._entries[name], self._files[name]


_user_folders: list[str] = []


def import_file(path: str) -> None:
    """Import a user's Python file, which may import the modules beside it, also later and within functions.

    Its folder stays at the END of `sys.path`: at the front it would hide modules of the standard library, of installed
    packages and of this project from everybody, and taken away after the import it would fail helpers that a function
    imports later. Python knows one module of a name, so that neighbours of equal names in two users' folders are
    refused, and a neighbour that an installed module hides is warned of.

    Args:
      path: absolute path of the file.

    Raises:
      ImportError: it imports a neighbour whose name another user's folder has, too; or it is no Python file.
      Exception: whatever the file raises.
    """
    folder, stem = os.path.dirname(path), os.path.splitext(os.path.basename(path))[0]
    if folder not in _user_folders:
        _user_folders.append(folder)
        sys.path.append(folder)
    importlib.invalidate_caches()
    _check_neighbours(path)
    # By its own name where that is free, so that a neighbour which imports it gets this very module.
    name = stem if _is_file(_find_module(stem), path) else f"agentr1_jax_user_{stem}_{_user_folders.index(folder)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file; name it *.py")
    module, earlier = importlib.util.module_from_spec(spec), sys.modules.get(name)
    sys.modules[name] = module  # Where dataclasses of the file look for themselves.
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        if earlier is not None:
            sys.modules[name] = earlier
        raise


def _check_neighbours(path: str) -> None:
    """Raise ImportError where a file, or a neighbour that it imports, would get another user's module of that name."""
    folder, files, checked = os.path.dirname(path), [path], set[str]()
    while files:
        for name in _imported_names(files.pop()) - checked:
            checked.add(name)
            candidates = (os.path.join(folder, f"{name}.py"), os.path.join(folder, name, "__init__.py"))
            beside = next(filter(os.path.isfile, candidates), None)
            if beside is None:
                continue
            found = _find_module(name)
            if _is_file(found, beside):
                files.append(beside)
            elif any(found.startswith(os.path.join(other, "")) for other in _user_folders):
                raise ImportError(
                    f"it imports {name!r}, and both {beside} and {found} have that name; rename one of them, or put "
                    "your files into one folder"
                )
            else:
                logging.warning("%s: imports %r, which is %s and not %s", path, name, found or "built in", beside)


def _imported_names(path: str) -> set[str]:
    """Return the first parts of the names of all modules that a file imports, anywhere in it."""
    with open(path, "rb") as source:
        nodes = list(ast.walk(ast.parse(source.read(), path)))
    whole = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    whole += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in whole}


def _find_module(name: str) -> str:
    """Return the file of a module, as it is imported or would be; "" where there is none."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None) or ""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    return spec.origin or "" if spec else ""


def _is_file(one: str, other: str) -> bool:
    return os.path.isfile(one) and os.path.samefile(one, other)


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
