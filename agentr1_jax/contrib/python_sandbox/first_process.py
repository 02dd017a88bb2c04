"""The first process of the sandbox: run the code in a child within limits, watch it, and report its end.

The interpreter in the sandbox gets this file as text, so it imports nothing but the standard library. The first line of
stdin is the job; stdin stays open for as long as the call is wanted. The output of the code, standard error included,
goes to stdout. The stderr of this process has the lines `started` and, as JSON, `{"kind": ..., "detail": ...}`.

Memory that the limits of a process do not count is either counted here (`exceeded_limit`: resident and swapped pages
and page tables of all processes, sockets, file locks) or cannot be had (`refuse_calls`).
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
MAX_FRAMES = 4
POLL_SECONDS = 0.02
FOLDERS = ("/tmp", "/dev/shm")
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH of the machines whose system calls are known; on others the sandbox does not start."""
CALLS = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "socket": (41, 198),
    "setsockopt": (54, 208),
    "vmsplice": (278, 75),
    "inotify_init": (253, 26),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "landlock_create_ruleset": (444, 444),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "ptrace": (101, 117),
    "unshare": (272, 97),
    "setns": (308, 268),
}
"""Refused system calls, with their numbers on x86-64 and ARM64: each takes kernel memory that no limit counts, or opens
more of the kernel than a program needs. Pairs of Unix sockets remain, whose buffers have their default size."""
CLONE, MMAP, SOCKETPAIR = (56, 220), (9, 222), (53, 199)
CLONE3, CLONE_NEWUSER, AF_UNIX = 435, 0x10000000, 1
SHARED_ANONYMOUS = 0x21
"""Flags of a mapping whose pages remain after they are unmapped, as long as one page of it is mapped."""
MAX_LOCKS = 1 << 16
"""Bytes of the list of file locks, about 80 for each."""
KINDS = {1: "exception", 121: "memory", 122: "processes", 123: "files"}
"""By the exit status of the child that runs the code; any other but 0 is the code's own."""
EXIT = {kind: status for status, kind in KINDS.items()}


def main() -> None:
    """Run one job."""
    job = json.loads(sys.stdin.buffer.readline())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Else the code could interrupt it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    dumpable(False)  # Else code of the same user could open this program's files, and tell the parent what it likes.
    child = os.fork()
    if child == 0:
        dumpable(True)
        confine(job)
        refuse_calls()
        report("started")
        os.dup2(1, 2)
        run(job["code"])
    report(json.dumps(watch(child, job)))


def dumpable(yes: bool) -> None:
    """Let processes of the same user look into this one, through /proc too, or not."""
    set_dumpable = 4
    if ctypes.CDLL(None, use_errno=True).prctl(set_dumpable, int(yes), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def report(line: str) -> None:
    """Write a line to the host."""
    os.write(2, line.encode() + b"\n")


def watch(child: int, limits: dict[str, Any]) -> dict[str, Any]:
    """Return how the code ended, or which limit of all processes together it exceeded."""
    while True:
        signal.sigtimedwait([signal.SIGCHLD], POLL_SECONDS)
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)  # All orphans of the namespace are its own.
            if pid == child:
                return exit_report(status)
            if pid == 0:
                break
        if select.select([0], [], [], 0)[0]:  # Closed: nobody waits any more.
            return {"kind": "abandoned"}
        kind = exceeded_limit(limits)
        if kind:
            return {"kind": kind}


def exit_report(status: int) -> dict[str, Any]:
    """Return the report for an exit status of the child."""
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        kind = {signal.SIGXCPU: "timeout", signal.SIGXFSZ: "files"}.get(number, "killed")
        return {"kind": kind, "detail": number.name}
    code = os.WEXITSTATUS(status)
    return {"kind": KINDS.get(code, "exit") if code else None, "detail": code}


def exceeded_limit(limits: dict[str, Any]) -> str | None:
    """Return the limit that the processes of this namespace exceed together, None if none."""
    threads, memory = used_memory(limits["socket"])
    if threads > limits["processes"]:  # Where the kernel does not count them: those of root.
        return "processes"
    with open("/proc/locks", "rb") as locks:
        if memory > limits["memory"] or len(locks.read(MAX_LOCKS)) == MAX_LOCKS:
            return "memory"
    return "files" if any(entries(folder) > limits["entries"] for folder in FOLDERS) else None


def used_memory(socket_bytes: int) -> tuple[int, int]:
    """Return the number of threads, and bytes of memory, of all other processes; shared pages count for each process.

    The memory of a process is read from each of its threads: the first thread has none once it has ended.
    """
    count = total = 0
    for process in os.listdir("/proc"):
        if not process.isdigit() or process == "1":
            continue
        most = 0
        for thread in list_folder(f"/proc/{process}/task"):
            count += 1
            most = max(most, memory_of(f"/proc/{process}/task/{thread}/status"))
        total += most
    with open("/proc/net/sockstat") as file:  # First line: "sockets: used 2".
        total += int(file.readline().split()[2]) * socket_bytes
    return count, total


def list_folder(path: str) -> list[str]:
    """Return the names in a folder; none where its process has ended."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def memory_of(path: str) -> int:
    """Return bytes of resident and swapped pages and of page tables, by the `status` of a thread; 0 if it has ended."""
    try:
        with open(path, "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith((b"VmRSS:", b"VmSwap:", b"VmPTE:")))


def entries(folder: str) -> int:
    """Return the number of files and folders in a file system; each takes memory even where it is empty."""
    status = os.statvfs(folder)
    return status.f_files - status.f_ffree


def confine(job: dict[str, Any]) -> None:
    """Limit this process, and all that it will start."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
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
        resource.RLIMIT_SIGPENDING: (job["open"],) * 2,  # Timers, too.
        resource.RLIMIT_AS: (job["memory"],) * 2,
    }
    for limit, (soft, hard) in limits.items():
        most = resource.getrlimit(limit)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(limit, (soft, hard))


def refuse_calls() -> None:
    """Refuse some system calls to this process and all that it will start, and large pages.

    Of a large page that is mapped only in part the whole remains, and only the part is counted.

    Raises:
      OSError: the machine is not known.
    """
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(f"no list of system calls for the machine {machine!r}")
    column = list(ARCHITECTURES).index(machine)
    load, equal, at_least, any_bit, mask, answer = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06  # of classic BPF
    number, architecture, first_argument, fourth_argument = 0, 4, 16, 40  # offsets in seccomp_data
    allow, refuse, unknown = 0x7FFF0000, 0x00050001, 0x00050026  # EPERM; ENOSYS, after which libc tries clone
    # (operation, operand, answer where the test holds; "else ..." where it does not)
    body: list[tuple[int, int, str]] = [(load, architecture, ""), (equal, ARCHITECTURES[machine], "else refuse")]
    body += [(load, number, ""), (at_least, 1 << 30, "refuse")]
    body += [(equal, numbers[column], "refuse") for numbers in CALLS.values()]
    body += [(equal, CLONE3, "unknown"), (equal, MMAP[column], "mmap"), (equal, SOCKETPAIR[column], "pair")]
    body += [(equal, CLONE[column], "else allow")]
    body += [(load, first_argument, ""), (any_bit, CLONE_NEWUSER, "refuse"), (at_least, 0, "allow")]
    labels = {"pair": len(body)}
    body += [(load, first_argument, ""), (equal, AF_UNIX, "else refuse"), (at_least, 0, "allow")]
    labels["mmap"] = len(body)
    body += [(load, fourth_argument, ""), (mask, SHARED_ANONYMOUS, ""), (equal, SHARED_ANONYMOUS, "else allow")]
    body += [(at_least, 0, "refuse")]
    labels |= {"allow": len(body), "refuse": len(body) + 1, "unknown": len(body) + 2}
    code = b""
    for place, (operation, operand, where) in enumerate(body):
        inverted, goal = where.startswith("else "), where.removeprefix("else ")
        jump = labels[goal] - place - 1 if goal else 0  # Counted from the next instruction.
        code += struct.pack("HBBI", operation, 0 if inverted else jump, jump if inverted else 0, operand)
    code += b"".join(struct.pack("HBBI", answer, 0, 0, value) for value in (allow, refuse, unknown))
    buffer = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HL", len(code) // 8, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, by_filter, disable_large_pages = 38, 22, 2, 41
    if (
        libc.prctl(disable_large_pages, 1, 0, 0, 0)
        or libc.prctl(no_new_privileges, 1, 0, 0, 0)
        or libc.prctl(seccomp, by_filter, program, 0, 0)
    ):
        raise OSError(ctypes.get_errno(), "prctl")


def run(code: str) -> NoReturn:
    """Run the code as a program; print the value of a last expression, as an interactive Python does."""
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
            print_traceback(error)
        os._exit(EXIT[kind_of(error)])  # At once: threads that go on would be waited for.
    sys.exit()


def kind_of(error: BaseException) -> str:
    """Return the limit that an exception tells of; `exception` if none."""
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


def print_traceback(error: BaseException) -> None:
    """Print the last lines of the traceback, from the code on."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename != CODE:
        frames = frames.tb_next
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        traceback.print_exception(type(error), error, frames, limit=-MAX_FRAMES, chain=False)
    except MemoryError:
        os.write(1, b"MemoryError\n")


if __name__ == "__main__":
    main()
