"""Function set `GorillaFileSystem`: commands of a shell on a file tree in memory."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from agentr1_jax.contrib.bfcl.base import TEXT, CallFailed, check, record

Folder = dict[str, Any]
"""Name -> entry: a file is its text, a folder is such a dict."""

DISK, ENTRY = 4_000_000, 100
"""Limit on the characters of all files, and the characters that an entry adds: copies of copies grow exponentially."""
MOST_DEPTH = 32
"""Limit on nested folders: comparing and storing a tree is recursive."""
UNITS = ("bytes", "KB", "MB", "GB")

_NAMES = {"pattern": r"^(?!\.{1,2}$)[^/]+$"}
_FILE = record(["type", "content"], type={"const": "file"}, content=TEXT)
_CONTENTS = {
    "type": "object",
    "propertyNames": _NAMES,
    "additionalProperties": {"oneOf": [{"$ref": "#/$defs/folder"}, _FILE]},
}
_FOLDER = record(["type", "contents"], type={"const": "directory"}, contents=_CONTENTS)
_ROOT = {
    "type": "object",
    "minProperties": 1,
    "propertyNames": _NAMES,
    "additionalProperties": {"$ref": "#/$defs/folder"},
}
CONFIG = {**record(["root"], root=_ROOT), "$defs": {"folder": _FOLDER}}


@dataclasses.dataclass
class FileSystem:
    """A tree of files, whose root has the folders of the config."""

    tree: Folder
    cwd: list[str]
    """names from the root to the working directory, which always exists: commands remove entries of this folder only"""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        check(config, CONFIG, "GorillaFileSystem")
        tree = {name: _tree(folder) for name, folder in config["root"].items()}
        return cls(tree, [next(iter(tree))])

    def pwd(self) -> dict[str, Any]:
        return {"current_working_directory": "/" + "/".join(self.cwd)}

    def ls(self, a: bool = False) -> dict[str, Any]:
        return {"current_directory_content": [name for name in self._here() if a or not name.startswith(".")]}

    def cd(self, folder: str) -> dict[str, Any]:
        if folder == "..":
            if not self.cwd:
                raise CallFailed("no_such_file", "the root has no parent directory")
            self.cwd = self.cwd[:-1]
        elif folder != ".":
            self._folder(folder)
            self.cwd = [*self.cwd, folder]
        return self.pwd()

    def mkdir(self, dir_name: str) -> dict[str, Any]:
        self._put(self.cwd, dir_name, {})
        return {}

    def touch(self, file_name: str) -> dict[str, Any]:
        self._put(self.cwd, file_name, "")
        return {}

    def echo(self, content: str, file_name: str | None = None) -> dict[str, Any]:
        if file_name is None:
            return {"terminal_output": content}
        self._file(file_name)
        self._here()[file_name] = content
        return {"terminal_output": None}

    def cat(self, file_name: str) -> dict[str, Any]:
        return {"file_content": self._file(file_name)}

    def tail(self, file_name: str, lines: int = 10) -> dict[str, Any]:
        if lines < 0:
            raise CallFailed("bad_value", f"lines is {lines}; it must not be negative")
        all_lines = self._file(file_name).splitlines()
        return {"last_lines": "\n".join(all_lines[max(len(all_lines) - lines, 0) :])}

    def sort(self, file_name: str) -> dict[str, Any]:
        return {"sorted_content": "\n".join(sorted(self._file(file_name).splitlines()))}

    def grep(self, file_name: str, pattern: str) -> dict[str, Any]:
        return {"matching_lines": [line for line in self._file(file_name).splitlines() if pattern in line]}

    def wc(self, file_name: str, mode: str = "l") -> dict[str, Any]:
        text = self._file(file_name)
        counts = {"l": ("lines", text.splitlines()), "w": ("words", text.split()), "c": ("characters", text)}
        if mode not in counts:
            raise CallFailed("bad_value", f"mode is {mode!r}; choose among {', '.join(counts)}")
        unit, counted = counts[mode]
        return {"count": len(counted), "type": unit}

    def diff(self, file_name1: str, file_name2: str) -> dict[str, Any]:
        texts = [self._file(name).splitlines() for name in (file_name1, file_name2)]
        lines = []
        for one, other in itertools.zip_longest(*texts):
            if one != other:
                lines += [f"{mark} {line}" for mark, line in (("-", one), ("+", other)) if line is not None]
        return {"diff_lines": "\n".join(lines)}

    def du(self, human_readable: bool = False) -> dict[str, Any]:
        size = sum(len(node.encode()) for _, node in _walk(self._here()) if isinstance(node, str))
        number, unit = float(size), 0
        while human_readable and number >= 1024 and unit + 1 < len(UNITS):
            number, unit = number / 1024, unit + 1
        return {"disk_usage": f"{number:.1f} {UNITS[unit]}" if unit else f"{size} {UNITS[0]}"}

    def find(self, path: str = ".", name: str | None = None) -> dict[str, Any]:
        paths = [at for at, _ in _walk(self._at(self._resolve(path)))]
        return {"matches": [at for at in paths if name is None or name in at.rpartition("/")[2]]}

    def rm(self, file_name: str) -> dict[str, Any]:
        self._node(file_name)
        del self._here()[file_name]
        return {"result": f"{file_name} is removed"}

    def rmdir(self, dir_name: str) -> dict[str, Any]:
        if self._folder(dir_name):
            raise CallFailed("not_empty", f"{dir_name!r} is not empty")
        return self.rm(dir_name)

    def mv(self, source: str, destination: str) -> dict[str, Any]:
        place = self._copy(source, destination)
        del self._here()[source]
        return {"result": f"{source} is now {place}"}

    def cp(self, source: str, destination: str) -> dict[str, Any]:
        return {"result": f"{source} is copied to {self._copy(source, destination)}"}

    def _here(self) -> Folder:
        return self._at(self.cwd)

    def _at(self, path: Sequence[str]) -> Folder:
        """Return the folder of a path that exists."""
        folder = self.tree
        for name in path:
            folder = folder[name]
        return folder

    def _node(self, name: str) -> str | Folder:
        """Return an entry of the working directory."""
        _check_name(name)
        if name not in self._here():
            raise CallFailed("no_such_file", f"there is no {name!r} in {self.pwd()['current_working_directory']}")
        return self._here()[name]

    def _file(self, name: str) -> str:
        node = self._node(name)
        if not isinstance(node, str):
            raise CallFailed("is_a_directory", f"{name!r} is a directory")
        return node

    def _folder(self, name: str) -> Folder:
        node = self._node(name)
        if isinstance(node, str):
            raise CallFailed("not_a_directory", f"{name!r} is not a directory")
        return node

    def _resolve(self, path: str) -> list[str]:
        """Return the names from the root to the folder of a path, which is absolute if it begins with a slash."""
        at = [] if path.startswith("/") else list(self.cwd)
        for part in path.split("/"):
            if part == "..":
                at = at[:-1]
            elif part not in ("", "."):
                if not isinstance(self._at(at).get(part), dict):
                    raise CallFailed("no_such_file", f"there is no directory {path!r}")
                at.append(part)
        return at

    def _copy(self, source: str, destination: str) -> str:
        """Copy an entry under a new name, or into a folder of the working directory; return its path from there."""
        node = self._node(source)
        if destination == source:
            raise CallFailed("same_file", f"{source!r} is the source and the destination")
        path, name = self.cwd, destination
        if isinstance(self._here().get(destination), dict):
            path, name = [*self.cwd, destination], source
        self._put(path, name, copy.deepcopy(node))
        return "/".join([*path[len(self.cwd) :], name])

    def _put(self, path: Sequence[str], name: str, node: str | Folder) -> None:
        """Add an entry to a folder."""
        _check_name(name)
        folder = self._at(path)
        if name in folder:
            raise CallFailed("file_exists", f"{'/'.join([*path[len(self.cwd) :], name])!r} exists")
        if len(path) + 1 + _depth(node) > MOST_DEPTH:
            raise CallFailed("no_space", f"directories may stand {MOST_DEPTH} within each other")
        if _size(self.tree) + _size({name: node}) > DISK:
            raise CallFailed("no_space", "there is no space left on the disk")
        folder[name] = node


def _check_name(name: str) -> None:
    if "/" in name or name in ("", ".", ".."):
        raise CallFailed("bad_name", f"{name!r} is not a name in the current directory; no path is allowed")


def _tree(folder: Mapping[str, Any]) -> Folder:
    """Return a folder of the config."""
    nodes = folder["contents"].items()
    return {name: node["content"] if node["type"] == "file" else _tree(node) for name, node in nodes}


def _walk(folder: Folder, before: str = "") -> Iterator[tuple[str, str | Folder]]:
    """Yield the entries of a folder and of its subfolders, with their paths from it."""
    for name, node in folder.items():
        yield before + name, node
        if isinstance(node, dict):
            yield from _walk(node, f"{before}{name}/")


def _size(folder: Folder) -> int:
    return sum(ENTRY + (len(node) if isinstance(node, str) else 0) for _, node in _walk(folder))


def _depth(node: str | Folder) -> int:
    return max((path.count("/") + 1 for path, _ in _walk(node)), default=0) if isinstance(node, dict) else 0
