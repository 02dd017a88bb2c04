"""The program that makes the sandbox where bubblewrap is absent: namespaces and a root of its own, by system calls.

It is started outside, as text, with its orders as JSON in its only argument:

    {"binds": [[path, target], ...], "links": [[what, path], ...], "size": bytes, "user": id | null, "command": [...]}

It becomes the waiting parent of the namespace, whose first process runs `command` in a root where nothing but the binds
(read-only), a minimal /dev, an own /proc and an empty /tmp of `size` can be seen. As root it maps one more `user`, whom
the command can become; as another user it has only its own, which is 1000 inside. Fails with a line on stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

INNER = 1000
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
MNT_DETACH = 2
SYS_MOUNT_SETATTR, AT_RECURSIVE = 442, 0x8000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
DEVICES = ("null", "zero", "full", "random", "urandom")
COVERED = ("sys", "sysrq-trigger", "irq", "bus")
ROOT = "/tmp"
"""Where the new root is put together; the namespace sees another /tmp then."""

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Makes the sandbox, runs the command in it and waits for it."""
    orders = json.loads(sys.argv[1])
    user, group = os.geteuid(), os.getegid()
    mapper = Mapper(user, group, orders["user"])
    spaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    checked(libc.unshare(CLONE_NEWUSER | spaces), "unshare")
    mapper.write()
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    checked(libc.sethostname(b"sandbox", 7), "sethostname")
    build_root(orders)
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    os.execv(orders["command"][0], orders["command"])


class Mapper:
    """Writes the namespace's table of ids: by itself, or where that needs root outside, by a child that stays there."""

    def __init__(self, user: int, group: int, spare: int | None) -> None:
        inner = INNER if spare is None else 0
        self._tables = {"uid_map": f"{inner} {user} 1\n", "gid_map": f"{inner} {group} 1\n"}
        self._child = None
        if spare is None:
            return
        for name in self._tables:
            self._tables[name] += f"{INNER} {spare} 1\n"
        waits, self._go = os.pipe()
        target = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._go)
            if os.read(waits, 1):
                write_tables(target, self._tables)
            os._exit(0)
        os.close(waits)

    def write(self) -> None:
        """To be called within the new namespace."""
        if self._child is None:
            write_file("/proc/self/setgroups", "deny")
            write_tables(os.getpid(), self._tables)
            return
        os.write(self._go, b"x")
        os.close(self._go)
        if os.waitpid(self._child, 0)[1]:
            raise OSError("the ids of the user namespace could not be mapped")


def write_tables(pid: int, tables: dict[str, str]) -> None:
    for name, table in tables.items():
        write_file(f"/proc/{pid}/{name}", table)


def write_file(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def build_root(orders: dict[str, Any]) -> None:
    """Puts the new root together and moves into it."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    binds = [(path, target, True) for path, target in orders["binds"]]
    binds += [(f"/dev/{name}", f"/dev/{name}", False) for name in DEVICES]
    # Held open, since the new root may cover them.
    held = [(os.open(path, os.O_PATH), target, plain) for path, target, plain in binds]
    mount("tmpfs", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.mkdir(f"{ROOT}/tmp")
    # An inode costs kernel memory too, a page at most.
    options = f"mode=1777,size={orders['size']},nr_inodes={max(orders['size'] // 4096, 64)}"
    mount("tmpfs", f"{ROOT}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for source, target, plain in held:  # Also beneath /tmp.
        bind(source, ROOT + target, plain)
    for what, path in [*orders["links"], ("/proc/self/fd", "/dev/fd"), ("/tmp", "/dev/shm")]:
        os.makedirs(os.path.dirname(ROOT + path), exist_ok=True)
        os.symlink(what, ROOT + path)
    os.mkdir(f"{ROOT}/proc")
    mount("proc", f"{ROOT}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    write_file(f"{ROOT}/proc/sys/user/max_user_namespaces", "0")
    for name in COVERED:
        path = f"{ROOT}/proc/{name}"
        if os.path.exists(path):
            mount(path, path, None, MS_BIND)
            mount(None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount(None, ROOT, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(ROOT)
    checked(libc.pivot_root(b".", b"."), "pivot_root")
    checked(libc.umount2(b".", MNT_DETACH), "umount")  # The old root, which lies over the new one.
    os.chdir("/tmp")


class MountAttributes(ctypes.Structure):
    """struct mount_attr."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def bind(source: int, target: str, plain: bool) -> None:
    """Shows what a descriptor names at `target`, read-only with all that is mounted below; a device unless `plain`."""
    path = f"/proc/self/fd/{source}"
    os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(path):
        write_file(target, "")
    mount(path, target, None, MS_BIND | MS_REC)
    attributes = MountAttributes(MS_RDONLY | MS_NOSUID | (MS_NODEV if plain else 0))
    where = ctypes.c_char_p(os.fsencode(target))
    size = ctypes.sizeof(attributes)
    result = libc.syscall(SYS_MOUNT_SETATTR, -100, where, AT_RECURSIVE, ctypes.byref(attributes), size)
    checked(result, f"mount_setattr {target} (Linux 5.12 or later)")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    result = libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3])
    checked(result, f"mount {source or ''} {target}")


def checked(result: int, what: str) -> None:
    """Raises OSError where a call of libc failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        os.write(2, f"{error}\n".encode())
        os._exit(125)
