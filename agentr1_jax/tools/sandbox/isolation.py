"""How a program is shut in here: by bubblewrap, by `unshare` and its kin, or not at all; and which of these works."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from agentr1_jax.tools.sandbox.limits import MIB, SandboxLimits

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    # Each thread counts as a process, and trainers need the cores.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # Each takes 64 MiB of the address space.
}
"""All that the code finds in its environment."""

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SHOWN = (
    *(f"/usr/{name}" for name in (*_SYSTEM, "libexec", "share")),
    *(f"/usr/local/{name}" for name in ("bin", "lib", "lib64")),
    *("/etc/ld.so.cache", "/etc/alternatives"),
)
"""Paths of the system that are visible inside, those that exist. Not all of /usr: containers keep projects there."""

_PROBE = "import json, sys; print(json.dumps([sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]))"
_FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python and the folders that it needs."""

    path: str
    folders: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Command:
    """What to start for one call.

    Attributes:
      argv: the program.
      user: the id that the code shall run as; None where it needs no other.
      isolated: whether the program makes a temporary folder for itself; else it needs one.
    """

    argv: Sequence[str]
    user: int | None
    isolated: bool = True


@functools.cache
def interpreter(path: str | None) -> Interpreter:
    """The interpreter at `path`; None is the one beneath this process's environment.

    Raises:
      ValueError: it does not run.
    """
    path = os.path.abspath(path or getattr(sys, "_base_executable", None) or sys.executable)
    try:
        asked = subprocess.run(
            [path, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True, env={}
        )
        return Interpreter(path, tuple(dict.fromkeys(json.loads(asked.stdout))))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or error
        raise ValueError(f"interpreter {path} does not run ({said}); name a Python of this machine") from error


def isolations() -> dict[str, Callable[[Interpreter, Sequence[str], SandboxLimits], Command]]:
    """A name -> from interpreter, further visible paths and limits to a command; the better ones first."""
    return {"bwrap": _bwrap, "unshare": _unshare}


def no_isolation(python: Interpreter, visible: Sequence[str], limits: SandboxLimits) -> Command:
    """The bare program: limits for each process are all there is, and a folder to begin in."""
    return Command(_program(python), None, isolated=False)


def _program(python: Interpreter) -> list[str]:
    return [python.path, "-I", "-X", "utf8", "-c", _source("inside.py")]


@functools.cache
def _source(name: str) -> str:
    return (_FOLDER / name).read_text("utf-8")


def _bwrap(python: Interpreter, visible: Sequence[str], limits: SandboxLimits) -> Command:
    user = _spare_id()
    argv = [shutil.which("bwrap") or "bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-net", "--unshare-uts"]
    # Not --die-with-parent: a bwrap killed as it starts leaves its child waiting for ever. The end of stdin suffices.
    argv += ["--unshare-cgroup-try", "--hostname", "sandbox", "--as-pid-1"]
    if user is None:
        argv += ["--unshare-user", "--uid", "1000", "--gid", "1000", "--disable-userns"]
    else:  # A namespace of bubblewrap's has one user, root outside, whose processes no limit counts.
        argv += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp"):
        argv += ["--size", str(limits.folder_mib * MIB), "--perms", "1777", "--tmpfs", folder]
    binds, links = _shown(python, visible)  # Also beneath /tmp.
    parents = {str(parent) for _, target in binds for parent in pathlib.PurePath(target).parents}
    for folder in sorted(parents - {"/", "/tmp"}):  # Else they would be closed to a user that is not root.
        argv += ["--perms", "0755", "--dir", folder]
    for path, target in binds:
        argv += ["--ro-bind", path, target]
    for what, path in links:
        argv += ["--symlink", what, path]
    argv += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--", *_program(python)]
    return Command(argv, user)


def _unshare(python: Interpreter, visible: Sequence[str], limits: SandboxLimits) -> Command:
    spare = _spare_id()
    binds, links = _shown(python, visible)
    orders = {"binds": binds, "links": links, "size": limits.folder_mib * MIB, "user": spare}
    text = json.dumps(orders | {"command": _program(python)})
    argv = [sys.executable, "-I", "-S", "-c", _source("launcher.py"), text]
    return Command(argv, None if spare is None else 1000)


def _shown(python: Interpreter, visible: Sequence[str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """What is visible inside: (path, target) of what is bound, (what, path) of links; parents before children."""
    links = [(os.readlink(f"/{name}"), f"/{name}") for name in _SYSTEM if os.path.islink(f"/{name}")]
    wanted = [f"/{name}" for name in _SYSTEM if not os.path.islink(f"/{name}")]
    wanted += [*_SHOWN, *(folder for folder in python.folders if folder != "/usr"), *visible]
    targets: list[str] = []
    for target in sorted({os.path.abspath(path) for path in wanted if os.path.exists(path)}):
        if not any(os.path.commonpath([target, parent]) == parent for parent in targets):
            targets.append(target)
    return [(os.path.realpath(target), target) for target in targets], links


def _spare_id() -> int | None:
    """An id that no process runs as, if this one may give ids away (it is root): processes are counted by it.

    It is drawn for each call from the last quarter of the largest range of ids that users and groups share.
    """
    if os.geteuid() != 0:
        return None
    ranges = []
    for name in ("uid_map", "gid_map"):
        lines = [list(map(int, line.split())) for line in pathlib.Path(f"/proc/self/{name}").read_text().splitlines()]
        ranges.append(max(((first, first + count) for first, _, count in lines), key=lambda ids: ids[1] - ids[0]))
    least, most = max(ids[0] for ids in ranges), min(ids[1] for ids in ranges)
    return random.randrange(most - (most - least) // 4, most) if most - least >= 1000 else None
