"""The limits of one call, and the command line of bubblewrap that starts it."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pydantic.dataclasses import dataclass

from agentr1_jax.validation import STRICT, Count, Positive

MIB = 1 << 20

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    # Each thread counts as a process, and trainers need the cores.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # Each arena takes 64 MiB of the address space.
}
"""The whole environment of the code."""

DEVICES = ("null", "full", "random", "urandom")
"""Not /dev/zero: a shared mapping of it is memory that no limit counts."""

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_VISIBLE = (
    *(f"/usr/{name}" for name in (*_SYSTEM, "libexec", "share")),
    *(f"/usr/local/{name}" for name in ("bin", "lib", "lib64")),
    *("/etc/ld.so.cache", "/etc/alternatives"),
)
"""Paths of the system that are visible inside, those that exist. Not all of /usr: containers keep projects there."""

_SHELL = ("/bin/sh", "-c", '{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null; exec "$@"', "sh")
"""Executes its arguments as what the kernel kills first where memory ends, in place of the trainer."""
_PROBE = "import json, sys; print(json.dumps([sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]))"
_PROGRAM = pathlib.Path(__file__).with_name("first_process.py")


@dataclass(frozen=True, config=STRICT)
class SandboxLimits:
    """Limits of one call.

    Attributes:
      seconds: time limit from the start of the code; the start of the sandbox does not count.
      memory_mib: address space of each process, and memory of all processes of the call together, in MiB.
      processes: processes and threads at once.
      output_bytes: bytes of standard output and standard error together.
      folder_mib: size of /tmp and of /dev/shm, each of which is memory, too, in MiB.
      file_mib: size of the largest file, in MiB.
    """

    seconds: Positive = 10.0
    memory_mib: Count = 1024
    processes: Count = 32
    output_bytes: Count = 16_384
    folder_mib: Count = 64
    file_mib: Count = 64


class Interpreter(NamedTuple):
    """A Python and the folders that it needs."""

    path: str
    folders: tuple[str, ...]


class Command(NamedTuple):
    """Program and arguments of one call, and the user and group id that the code runs as; None for this process's."""

    argv: Sequence[str]
    user: int | None


@functools.cache
def find_interpreter(path: str | None) -> Interpreter:
    """Return the interpreter at `path`, by default the one beneath this process's environment.

    Raises:
      ValueError: it does not run.
    """
    path = os.path.abspath(path or getattr(sys, "_base_executable", None) or sys.executable)
    try:
        probe = subprocess.run(
            [path, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True, env={}
        )
        return Interpreter(path, tuple(dict.fromkeys(json.loads(probe.stdout))))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = getattr(error, "stderr", None) or error
        raise ValueError(f"interpreter {path} does not run ({reason}); name a Python of this machine") from error


def make_command(python: Interpreter, visible: Sequence[str], limits: SandboxLimits) -> Command:
    """Return the command that runs `first_process.py` in a sandbox; the code may read what is `visible`, too."""
    user = _unused_id()
    argv = [*_SHELL, shutil.which("bwrap") or "bwrap"]
    argv += ["--unshare-pid", "--unshare-ipc", "--unshare-net", "--unshare-uts"]
    # Not --die-with-parent: a bwrap killed as it starts leaves its child waiting for ever. The end of stdin suffices.
    argv += ["--unshare-cgroup-try", "--hostname", "sandbox", "--as-pid-1"]
    if user is None:
        argv += ["--unshare-user", "--uid", "1000", "--gid", "1000", "--disable-userns"]
    else:  # A user namespace of bubblewrap has one user, root outside, whose processes no limit counts.
        argv += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    argv += ["--proc", "/proc", "--perms", "0755", "--size", str(MIB), "--tmpfs", "/dev"]
    for name in DEVICES:
        argv += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    argv += ["--symlink", "/proc/self/fd", "/dev/fd"]
    for folder in ("/dev/shm", "/tmp"):
        argv += ["--size", str(limits.folder_mib * MIB), "--perms", "1777", "--tmpfs", folder]
    binds, links = _visible_paths(python, visible)  # Also beneath /tmp.
    parents = {str(parent) for _, target in binds for parent in pathlib.PurePath(target).parents}
    for folder in sorted(parents - {"/", "/tmp"}):  # Else they would be closed to a user that is not root.
        argv += ["--perms", "0755", "--dir", folder]
    for path, target in binds:
        argv += ["--ro-bind", path, target]
    for destination, path in links:
        argv += ["--symlink", destination, path]
    # /proc, too: a process may take back that it is killed first.
    argv += ["--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]
    return Command([*argv, python.path, "-I", "-X", "utf8", "-c", _program()], user)


@functools.cache
def _program() -> str:
    return _PROGRAM.read_text("utf-8")


def _visible_paths(python: Interpreter, visible: Sequence[str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return binds (path, target) and symbolic links (destination, path); parents before children."""
    links = [(os.readlink(f"/{name}"), f"/{name}") for name in _SYSTEM if os.path.islink(f"/{name}")]
    paths = [f"/{name}" for name in _SYSTEM if not os.path.islink(f"/{name}")]
    paths += [*_VISIBLE, *(folder for folder in python.folders if folder != "/usr"), *visible]
    targets: list[str] = []
    for target in sorted({os.path.abspath(path) for path in paths if os.path.exists(path)}):
        if not any(os.path.commonpath([target, parent]) == parent for parent in targets):
            targets.append(target)
    return [(os.path.realpath(target), target) for target in targets], links


def _unused_id() -> int | None:
    """Return an id that no process runs as, by which the kernel counts processes; None where this one is not root.

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
