"""One call: start the sandbox, write the job, read the output, and kill the program with all its children."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
from typing import IO, Any, cast

from agentr1_jax.contrib.python_sandbox.bubblewrap import ENVIRONMENT, MIB, Command, SandboxLimits

START_SECONDS = 30.0
"""Time limit for the start of the sandbox, also on a busy machine."""
CLOSING_SECONDS = 1.0
"""Time limit for the last of the output after the program has ended."""
OPEN_FILES = 128
KINDS = (None, "exception", "exit", "timeout", "memory", "processes", "files", "killed")
"""Ends that the program in the sandbox reports; whatever else it may be made to write counts as `killed`."""
_CHUNK = 1 << 16
_MAX_MESSAGES = 10_000  # bytes of the program's standard error


@dataclasses.dataclass(frozen=True)
class ProgramEnd:
    """End of a call.

    Attributes:
      kind: None after success; `exception`, `exit`, `timeout`, `memory`, `processes`, `files`, `output_limit` or
        `killed` where the code failed; `sandbox` where it was never started.
      output: output of the code, no longer than the limit.
      detail: an exit status, the name of a signal, or the words of the sandbox.
    """

    kind: str | None
    output: str
    detail: Any = None


async def run_program(command: Command, code: str, limits: SandboxLimits) -> ProgramEnd:
    """Run the code. Where the waiter is cancelled, the program and its children are killed first."""
    job = {
        "code": code,
        "user": command.user,
        "seconds": limits.seconds,
        "memory": limits.memory_mib * MIB,
        "processes": limits.processes,
        "file": limits.file_mib * MIB,
        "entries": limits.folder_mib * MIB // 4096,
        "open": OPEN_FILES,
        "socket": _socket_bytes(),
    }
    try:
        # Not asyncio's: it wants a thread for each, and its start hangs where it is cancelled (CPython 3.11).
        process = subprocess.Popen(
            command.argv,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(ENVIRONMENT),
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        return ProgramEnd("sandbox", "", f"{command.argv[0]}: {error.strerror}")
    program = _Program(process, json.dumps(job).encode() + b"\n", limits.output_bytes)
    try:
        return await program.wait(limits.seconds)
    finally:
        program.kill()


def _socket_bytes() -> int:
    """Return the most memory that the buffer of a socket takes: its default size, and one message beyond it."""
    setting = pathlib.Path("/proc/sys/net/core/wmem_default")  # Not visible in some containers.
    return 2 * (int(setting.read_text()) if setting.exists() else 212_992)


class _Program:
    """A running program, whose pipes the running event loop serves.

    Args:
      job: first line of its stdin.
      max_output: bytes of its stdout that are kept, and one more.
    """

    def __init__(self, process: subprocess.Popen[bytes], job: bytes, max_output: int) -> None:
        self._process = process
        self._job = job
        self._max_output = max_output
        self._output, self._messages = bytearray(), bytearray()
        self._start, self._end, self._close = asyncio.Event(), asyncio.Event(), asyncio.Event()
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

    async def wait(self, seconds: float) -> ProgramEnd:
        """Wait for the start of the code, then at most `seconds` for its end."""
        if not await _wait_for(self._start, START_SECONDS):
            return ProgramEnd("sandbox", "", f"not ready within {START_SECONDS:g} s; {self._message_text()}")
        if not await _wait_for(self._end, seconds):
            return ProgramEnd("timeout", self._output_text())
        if len(self._output) <= self._max_output:
            await _wait_for(self._close, CLOSING_SECONDS)  # The last of its output may be on its way.
        if len(self._output) > self._max_output:
            return ProgramEnd("output_limit", self._output_text())
        if b"started\n" not in self._messages:
            return ProgramEnd("sandbox", "", self._message_text())
        report = self._report() or {}
        kind = report.get("kind", "killed")
        return ProgramEnd(kind if kind in KINDS else "killed", self._output_text(), report.get("detail"))

    def kill(self) -> None:
        """Kill the process group, hence the first process of the namespace, hence all within."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()  # At once; until then the group's id is its own.
        self._loop.remove_writer(self._stdin)
        for pipe in self._open:
            self._loop.remove_reader(pipe)
        for file in (self._process.stdin, self._process.stdout, self._process.stderr):
            cast(IO[bytes], file).close()

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
        if pipe == self._stdout:
            self._output += data[: self._max_output + 1 - len(self._output)]
        else:
            self._messages += data[: _MAX_MESSAGES - len(self._messages)]
        # Only the program itself has its stderr, and closes it by its end.
        over = self._stderr not in self._open
        if over or b"started\n" in self._messages:
            self._start.set()
        if over or len(self._output) > self._max_output or self._report():
            self._end.set()
        if not self._open:
            self._close.set()

    def _report(self) -> dict[str, Any] | None:
        for line in self._messages.splitlines():
            if line.startswith(b"{"):
                with contextlib.suppress(ValueError):
                    return cast(dict[str, Any], json.loads(line))
        return None

    def _output_text(self) -> str:
        return self._output[: self._max_output].decode("utf-8", "replace")

    def _message_text(self) -> str:
        return self._messages.decode("utf-8", "replace").strip() or "it wrote nothing"


async def _wait_for(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
