"""Messages about mistakes in config files, overrides and flags: the key, where it is written, and what it may be."""

from __future__ import annotations

import difflib
import os
import re
import traceback
from collections.abc import Iterator, Sequence

import ml_collections
from absl import flags

from agentr1_jax.errors import DISK_FULL


def file_system_message(error: BaseException) -> str | None:
    """Return a message for an error of the file system that the user can act on; None for any other error."""
    if isinstance(error, FileNotFoundError):
        return f"{error.filename or error}: no such file or folder"
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return (
            f"{error.filename or 'the disk'}: {error.strerror}; what was saved before is intact. Free some space: the "
            "same command goes on from the last checkpoint"
        )
    return None


def unknown_key(where: str, key: str, known: Sequence[str]) -> str:
    """Return the message for an unknown key; it names the nearest dotted key, or one with the same last part."""
    near = difflib.get_close_matches(key, known, 1, 0.75)
    near = near or [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    near = near or difflib.get_close_matches(key, known, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else "configs/base.py lists the keys"
    return f"{where}: unknown key {key!r}; {hint}"


def describe_illegal_value(error: flags.IllegalFlagValueError, path: str, config: ml_collections.ConfigDict) -> str:
    """Return the message for a flag or an override whose value has another type than the key in the config file."""
    match = re.match(r"flag --config\.([^=]+)=(.*?): ", str(error), re.DOTALL)
    if not match:
        return first_line(error)
    *sections, name = match[1].split(".")
    for part in sections:
        config = config[part]
    return f"{path}: key {match[1]!r} takes {_type_name(config, name)}, not {match[2]!r}"


def describe_config_error(file: str, error: Exception) -> str:
    """Return one line for an exception raised while `file` was executed, with the innermost line of the user's code.

    ConfigDict's errors name only the last part of a key. Its section, and the config around that, are local variables
    in the frames of the traceback.
    """
    library = os.path.dirname(ml_collections.__file__)
    where, configs, section = file, [], None
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        configs += [value for value in frame.f_locals.values() if isinstance(value, ml_collections.ConfigDict)]
        if name.startswith(library):
            section = frame.f_locals.get("self")
        elif os.path.dirname(name) != os.path.dirname(__file__) and not name.startswith("<"):
            where = f"{os.path.relpath(name)}, line {line}"
    message = str(error.args[0]) if error.args else ""
    unknown = isinstance(error, KeyError | AttributeError) and re.match(r"\W*(?:Key \W)?(\w+)", message)
    mistyped = isinstance(error, TypeError) and re.match(r"Could not override field '(\w+)'", message)
    if isinstance(section, ml_collections.ConfigDict) and (unknown or mistyped):
        root = max(configs, key=lambda config: len(list(_leaf_keys(config))))
        prefix = _dotted_name(root, section)
        if unknown:
            return unknown_key(where, f"{prefix}{unknown[1]}", list(_leaf_keys(root)))
        if mistyped:
            return f"{where}: key '{prefix}{mistyped[1]}' takes {_type_name(section, mistyped[1])}, not another type"
    return f"{where}: {type(error).__name__}: {first_line(error)}"


def list_config_files(file: str) -> str:
    """Return a phrase that lists the config files in the folder of a missing one."""
    folder = os.path.dirname(file) or "."
    if not os.path.isdir(folder):
        return f"; there is no folder {folder!r} here"
    names = sorted(name for name in os.listdir(folder) if name.endswith(".py") and name != "__init__.py")
    return f"; {folder} has {', '.join(names)}" if names else f"; {folder} has no config files"


def _type_name(section: ml_collections.ConfigDict, name: str) -> str:
    kind = section.get_type(name).__name__
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _dotted_name(root: ml_collections.ConfigDict, section: ml_collections.ConfigDict, prefix: str = "") -> str:
    """Return the dotted name of a section of `root` with a trailing dot; empty if it is the root or not in it."""
    for name, value in root.items():
        if isinstance(value, ml_collections.ConfigDict):
            if value is section:
                return f"{prefix}{name}."
            if below := _dotted_name(value, section, f"{prefix}{name}."):
                return below
    return ""


def _leaf_keys(config: ml_collections.ConfigDict, prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, ml_collections.ConfigDict) and len(value):
            yield from _leaf_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    text = str(error.args[0]) if error.args else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]
