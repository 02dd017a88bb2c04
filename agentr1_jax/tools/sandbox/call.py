"""One call: a program is started, fed its job, watched from outside, and killed with all its children."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from typing import IO, Any, cast

from agentr1_jax.tools.sandbox.isolation import ENVIRONMENT, Command
from agentr1_jax.tools.sandbox.limits import MIB, SandboxLimits

START_SECONDS = 30.0
"""In which the sandbox has to be ready for the code, also on a busy machine."""
CLOSING_SECONDS = 1.0
"""How long the output may stay open after the program has ended; without isolation a child may hold it."""
OPEN_FILES = 128
REPORTED = (None, "exception", "exit", "timeout", "memory", "processes", "files", "killed")
"""What the program in the sandbox says of the code's end; whatever else it may be made to say counts as `killed`."""
_CHUNK = 1 << 16
_MOST_SAID = 10_000  # bytes of the sandbox's own words that are kept


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a call ended.

    Attributes:
      kind: None if well; `exception`, `exit`, `timeout`, `memory`, `processes`, `files`, `output_limit` or `killed` if
        the code did not; `sandbox` if it was never started.
      output: what the code wrote, at most as long as the limit.
      detail: an exit status, the name of a signal, or what the sandbox said.
    """

    kind: str | None
    output: str
    detail: Any = None


async def run(command: Command, code: str, limits: SandboxLimits) -> Ended:
    """Runs the code. Where the waiter is cancelled, the program is killed with its children first."""
    job = {
        "code": code,
        "user": command.user,
        "seconds": limits.seconds,
        "memory": limits.memory_mib * MIB,
        "processes": limits.processes,
        "file": limits.file_mib * MIB,
        "entries": limits.folder_mib * MIB // 4096,
        "open": OPEN_FILES,
    }
    if command.isolated:
        return await _run_in("/", dict(ENVIRONMENT), command, job, limits)
    with tempfile.TemporaryDirectory(prefix="python-tool-", ignore_cleanup_errors=True) as folder:
        return await _run_in(folder, {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder}, command, job, limits)


async def _run_in(
    folder: str, environment: Mapping[str, str], command: Command, job: Mapping[str, Any], limits: SandboxLimits
) -> Ended:
    try:
        # Not asyncio's: it wants a thread for each, and its start hangs where it is cancelled (CPython 3.11).
        process = subprocess.Popen(
            command.argv,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
    except OSError as error:
        return Ended("sandbox", "", f"{command.argv[0]}: {error.strerror}")
    program = _Program(process, json.dumps(job).encode() + b"\n", limits.output_bytes)
    try:
        return await program.watched(limits.seconds)
    finally:
        program.end()


class _Program:
    """A running program: its job is written and what it says is read as that goes, by the running event loop."""

    def __init__(self, process: subprocess.Popen[bytes], job: bytes, most: int) -> None:
        self._process = process
        self._job = job
        self._most = most
        self._output, self._said = bytearray(), bytearray()
        self._started, self._over, self._closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._stdin, self._stdout, self._stderr = (
            cast(IO[bytes], pipe).fileno() for pipe in (process.stdin, process.stdout, process.stderr)
        )
        self._open = {self._stdout, self._stderr}
        for pipe in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(pipe, False)
        self._loop.add_writer(self._stdin, self._write)
        for pipe in (self._stdout, self._stderr):
            self._loop.add_reader(pipe, self._read, pipe)

    def _write(self) -> None:
        try:
            self._job = self._job[os.write(self._stdin, self._job) :]
        except BlockingIOError:
            return
        except OSError:  # It is gone.
            self._job = b""
        if not self._job:
            # The pipe stays open: its end tells the program that nobody waits any more.
            self._loop.remove_writer(self._stdin)

    def _read(self, pipe: int) -> None:
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(pipe)
            self._open.discard(pipe)
        kept, most = (self._output, self._most + 1) if pipe == self._stdout else (self._said, _MOST_SAID)
        kept += data[: most - len(kept)]
        # The program has its stderr for itself, and closes it by its end.
        gone = self._stderr not in self._open
        if gone or b"started\n" in self._said:
            self._started.set()
        if gone or len(self._output) > self._most or self._report():
            self._over.set()
        if not self._open:
            self._closed.set()

    def end(self) -> None:
        """Kills the program with its process group, hence the first process of a namespace, hence all within."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()  # At once; until then the group's id is its own.
        self._loop.remove_writer(self._stdin)
        for pipe in self._open:
            self._loop.remove_reader(pipe)
        for file in (self._process.stdin, self._process.stdout, self._process.stderr):
            cast(IO[bytes], file).close()

    async def watched(self, seconds: float) -> Ended:
        """Waits for the start of the code, then `seconds` for its end."""
        if not await _in_time(self._started, START_SECONDS):
            return Ended("sandbox", "", f"not ready within {START_SECONDS:g} s; {self._words()}")
        if not await _in_time(self._over, seconds):
            return Ended("timeout", self._text())
        if len(self._output) <= self._most:
            await _in_time(self._closed, CLOSING_SECONDS)  # The last of its output may be on its way.
        if len(self._output) > self._most:
            return Ended("output_limit", self._text())
        if b"started\n" not in self._said:
            return Ended("sandbox", "", self._words())
        report = self._report() or {}
        kind = report.get("kind", "killed")
        return Ended(kind if kind in REPORTED else "killed", self._text(), report.get("detail"))

    def _report(self) -> dict[str, Any] | None:
        for line in self._said.splitlines():
            if line.startswith(b"{"):
                with contextlib.suppress(ValueError):
                    return cast(dict[str, Any], json.loads(line))
        return None

    def _text(self) -> str:
        return self._output[: self._most].decode("utf-8", "replace")

    def _words(self) -> str:
        return self._said.decode("utf-8", "replace").strip() or "it said nothing"


async def _in_time(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
