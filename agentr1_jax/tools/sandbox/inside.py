"""The program inside the sandbox: it runs the code in a child within limits, watches it, and says how it ended.

It is handed to the sandbox's interpreter as text, so it imports nothing but the standard library. Its first line of
stdin is the job; stdin stays open for as long as the call is wanted. What the code writes, to standard error too, goes
to stdout. Its own stderr has the lines `started` and, as JSON, `{"kind": ..., "detail": ...}`.
"""

from __future__ import annotations

import ast
import ctypes
import json
import linecache
import math
import os
import resource
import select
import signal
import struct
import sys
import traceback
import types
from typing import Any, NoReturn

CODE = "<python>"
MOST_FRAMES = 4
POLL = 0.05  # seconds
FOLDERS = ("/tmp", "/dev/shm")
# By machine: its AUDIT_ARCH, and what no limit counts or what opens more of the kernel than a program needs:
# memfd_create, shmget, msgget, memfd_secret, io_uring_setup, bpf, userfaultfd, perf_event_open, add_key, request_key,
# keyctl, ptrace, unshare, setns.
REFUSED = {
    "x86_64": (0xC000003E, (319, 29, 68, 447, 425, 321, 323, 298, 248, 249, 250, 101, 272, 308)),
    "aarch64": (0xC00000B7, (279, 194, 186, 447, 425, 280, 282, 241, 217, 218, 219, 117, 97, 268)),
}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3, CLONE_NEWUSER = 435, 0x10000000
KINDS = {1: "exception", 121: "memory", 122: "processes", 123: "files"}
"""By the exit status of the child that runs the code; any other but 0 is the code's own."""
EXIT = {kind: status for status, kind in KINDS.items()}


def main() -> None:
    """Runs one job."""
    job = json.loads(sys.stdin.buffer.readline())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Else the code could interrupt it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    first = os.getpid() == 1  # Of a namespace, with which all other processes in it end.
    dumpable(False)  # Else code of the same user could open this program's files, and tell the parent what it likes.
    child = os.fork()
    if child == 0:
        dumpable(True)
        confine(job, new_session=first)
        refuse_calls()
        say("started")
        os.dup2(1, 2)
        run(job["code"])
    say(json.dumps(watch(child, job if first else None)))
    if not first and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def dumpable(yes: bool) -> None:
    """Whether processes of the same user may look into this one, through /proc too."""
    set_dumpable = 4
    if ctypes.CDLL(None, use_errno=True).prctl(set_dumpable, int(yes), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def say(line: str) -> None:
    """Tells the parent."""
    os.write(2, line.encode() + b"\n")


def watch(child: int, limits: dict[str, Any] | None) -> dict[str, Any]:
    """How the code ended, or which of the limits of all processes together it broke."""
    while True:
        signal.sigtimedwait([signal.SIGCHLD], POLL)
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)  # All orphans of the namespace are its own.
            if pid == child:
                return ended(status)
            if pid == 0:
                break
        if select.select([0], [], [], 0)[0]:  # Closed: nobody waits any more.
            return {"kind": "abandoned"}
        kind = broken(limits) if limits else None
        if kind:
            return {"kind": kind}


def ended(status: int) -> dict[str, Any]:
    """What the status of the child says."""
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        kind = {signal.SIGXCPU: "timeout", signal.SIGXFSZ: "files"}.get(number, "killed")
        return {"kind": kind, "detail": number.name}
    code = os.WEXITSTATUS(status)
    return {"kind": KINDS.get(code, "exit") if code else None, "detail": code}


def broken(limits: dict[str, Any]) -> str | None:
    """Which limit the processes of this namespace break together; pages that several share count for each."""
    count = pages = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            count += 1
            try:
                with open(f"/proc/{name}/statm") as file:
                    pages += int(file.read().split()[1])
            except (OSError, IndexError):  # It has ended.
                continue
    if count > limits["processes"]:  # Where the kernel does not count them: those of root.
        return "processes"
    if pages * resource.getpagesize() > limits["memory"]:
        return "memory"
    return "files" if any(entries(folder) > limits["entries"] for folder in FOLDERS) else None


def entries(folder: str) -> int:
    """Files and folders of the file system of `folder`, each of which takes memory even where it is empty."""
    status = os.statvfs(folder)
    return status.f_files - status.f_ffree


def confine(job: dict[str, Any], new_session: bool) -> None:
    """Limits this process, and all that it will start."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    if new_session:
        os.setsid()  # Else it could signal its process group, which reaches out of the namespace.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    if job["user"] is not None:
        os.setgroups([])
        os.setresgid(*[job["user"]] * 3)
        os.setresuid(*[job["user"]] * 3)
    seconds = math.ceil(job["seconds"])
    limits = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_CPU: (seconds + 1, seconds + 2),
        resource.RLIMIT_FSIZE: (job["file"],) * 2,
        resource.RLIMIT_NOFILE: (job["open"],) * 2,
        # This program counts where it has the same user.
        resource.RLIMIT_NPROC: (job["processes"] + (job["user"] is None),) * 2,
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_AS: (job["memory"],) * 2,
    }
    for limit, (soft, hard) in limits.items():
        most = resource.getrlimit(limit)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(limit, (soft, hard))


def refuse_calls() -> None:
    """Refuses some system calls to this process and all that it will start; on machines that are not known, none."""
    machine = os.uname().machine
    if machine not in REFUSED:
        return
    architecture, numbers = REFUSED[machine]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06  # of classic BPF
    allow, refuse, unknown = 0x7FFF0000, 0x00050001, 0x00050026  # EPERM; ENOSYS, after which libc tries clone
    # Jumps are counted from the next instruction; the last three are the answers.
    body = [(load, 4, None), (equal, architecture, "else refuse"), (load, 0, None), (at_least, 1 << 30, "refuse")]
    body += [(equal, number, "refuse") for number in numbers]
    body += [(equal, CLONE3, "unknown"), (equal, CLONE[machine], "else allow"), (load, 16, None)]
    body += [(any_bit, CLONE_NEWUSER, "refuse")]
    answers = {"allow": len(body), "refuse": len(body) + 1, "unknown": len(body) + 2}
    code = b""
    for place, (operation, operand, where) in enumerate(body):
        inverted, goal = (where or "").startswith("else "), (where or "").removeprefix("else ")
        jump = answers[goal] - place - 1 if goal else 0
        code += struct.pack("HBBI", operation, 0 if inverted else jump, jump if inverted else 0, operand)
    code += b"".join(struct.pack("HBBI", give, 0, 0, answer) for answer in (allow, refuse, unknown))
    buffer = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HL", len(code) // 8, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, by_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(seccomp, by_filter, program, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def run(code: str) -> NoReturn:
    """Runs the code as a program; prints the value of a last expression, as an interactive Python does."""
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    linecache.cache[CODE] = len(code), None, f"{code}\n".splitlines(keepends=True), CODE
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = [""]
    process = os.getpid()
    try:
        tree = ast.parse(code, CODE)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, CODE, "exec"), main.__dict__)
        if isinstance(last, ast.Expr):
            sys.displayhook(eval(compile(ast.Expression(last.value), CODE, "eval"), main.__dict__))
    except SystemExit:
        raise
    except BaseException as error:
        if os.getpid() == process:  # Else a copy of it, made by a bare fork: there may be many.
            show(error)
        os._exit(EXIT[kind_of(error)])  # At once: threads that go on would be waited for.
    sys.exit()


def kind_of(error: BaseException) -> str:
    """Which limit an exception tells of; `exception` if none."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError) and error.errno in (27, 28):  # EFBIG, ENOSPC
        return "files"
    if isinstance(error, BlockingIOError):  # So says a fork too many, and a read that would have to wait.
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
        return "processes" if "fork" in line or "spawn" in line else "exception"
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return "processes"
    return "exception"


def show(error: BaseException) -> None:
    """Prints the last lines of the traceback, from the code on."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename != CODE:
        frames = frames.tb_next
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        traceback.print_exception(type(error), error, frames, limit=-MOST_FRAMES, chain=False)
    except MemoryError:
        os.write(1, b"MemoryError\n")


if __name__ == "__main__":
    main()
