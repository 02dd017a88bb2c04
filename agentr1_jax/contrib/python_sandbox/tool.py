"""The python tool."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from agentr1_jax.contrib.python_sandbox.bubblewrap import Interpreter, SandboxLimits, find_interpreter, make_command
from agentr1_jax.contrib.python_sandbox.process import ProgramEnd, run_program
from agentr1_jax.tools.base import ToolResult, failure

MAX_CODE_CHARACTERS = 100_000
EMPTY_OUTPUT = "No output."


class PythonTool:
    """Tool `python(code)`: run the code in a sandbox of its own and show its output.

    The value of a last expression is shown too, as an interactive Python does. Nothing is kept between calls. Failures
    of the code are the model's fault: `exception` (with the last lines of the traceback), `exit` (a status other than
    0), `timeout`, `memory`, `processes`, `files`, `output_limit`, `killed` (by a signal). `sandbox`, where the code
    could not be started, is the infrastructure's.

    Args:
      python: path of the interpreter, whose environment's packages the code can import; by default the one beneath this
        process's environment.
      visible: further files and folders that the code may read, at the same paths. Where this process is root, the
        code runs as another user: they have to be readable by all.

    Raises:
      ValueError: bubblewrap is missing or does not work here, or the interpreter does not run; the message says what to
        do.
    """

    name = "python"
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "code": {
                "type": "string",
                "minLength": 1,
                "maxLength": MAX_CODE_CHARACTERS,
                "description": "a whole program",
            }
        },
        "required": ["code"],
        "additionalProperties": False,
    }

    def __init__(
        self, limits: SandboxLimits | None = None, python: str | None = None, visible: Sequence[str] = ()
    ) -> None:
        self.limits = limits or SandboxLimits()
        self._interpreter = find_interpreter(python)
        self._visible = tuple(visible)
        if problem := _problem(self._interpreter, self._visible):
            raise ValueError(
                f"the python tool needs bubblewrap 0.7 or later, which does not work here ({problem}): apt install "
                "bubblewrap, and allow user namespaces (sysctl kernel.unprivileged_userns_clone, "
                "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; in a container, its seccomp "
                "profile)"
            )

    @property
    def description(self) -> str:
        """Description for the policy, with the time limit."""
        return (
            "Runs Python code in a new interpreter and shows what it prints, and the value of a last expression. There "
            f"is no network; variables and files do not outlast the call. At most {self.limits.seconds:g} seconds."
        )

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one program; see the class."""
        command = make_command(self._interpreter, self._visible, self.limits)
        return _to_result(await run_program(command, arguments["code"], self.limits), self.limits)


def _to_result(end: ProgramEnd, limits: SandboxLimits) -> ToolResult:
    output = end.output.rstrip("\n")
    if end.kind is None:
        return ToolResult(output or EMPTY_OUTPUT)
    if end.kind == "sandbox":
        return failure("sandbox", f"Error: the sandbox does not start: {end.detail}", "infrastructure")
    if end.kind == "exception":
        return failure("exception", output)
    reasons = {
        "exit": f"exit status {end.detail}",
        "killed": f"killed by {end.detail or 'a signal'}",
        "timeout": f"stopped after {limits.seconds:g} s",
        "memory": f"more than {limits.memory_mib} MiB of memory",
        "processes": f"more than {limits.processes} processes and threads",
        "files": f"files above {limits.file_mib} MiB each, or {limits.folder_mib} MiB together",
        "output_limit": f"stopped after {limits.output_bytes} bytes of output",
    }
    return failure(end.kind, "\n".join(filter(None, [output, f"Error: {reasons[end.kind]}."])))


@functools.cache
def _problem(interpreter: Interpreter, visible: tuple[str, ...]) -> str | None:
    """Return why a small program does not run in the sandbox; None if it does. Tried once."""
    limits = SandboxLimits()
    ends: list[ProgramEnd] = []

    def run() -> None:
        ends.append(asyncio.run(run_program(make_command(interpreter, visible, limits), "6 * 7", limits)))

    thread = threading.Thread(target=run)  # With a loop of its own: the caller may be within a running one.
    thread.start()
    thread.join()
    if ends[0].kind is None and ends[0].output == "42\n":
        return None
    return f"{ends[0].detail or ends[0].output or ends[0].kind}"
