"""The python tool."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from agentr1_jax.tools.base import ToolResult, failed
from agentr1_jax.tools.sandbox.call import Ended, run
from agentr1_jax.tools.sandbox.isolation import Command, interpreter, isolations, no_isolation
from agentr1_jax.tools.sandbox.limits import SandboxLimits

MOST_CHARACTERS = 100_000
"""Of the code of one call."""
EMPTY_OUTPUT = "No output."


class PythonTool:
    """Tool `python(code)`: runs the code in a subprocess of its own, and shows what it writes.

    The value of a last expression is shown too, as an interactive Python does. Nothing is kept between calls. Failures
    of the code are the model's fault: `exception` (with the last lines of the traceback), `exit` (a status other than
    0), `timeout`, `memory`, `processes`, `files`, `output_limit`, `killed` (by a signal). `sandbox`, where the code
    could not be started, is the infrastructure's.

    Attributes:
      isolation: what shuts the code in: `bwrap`, `unshare`, or `none`.
      scope: tells tools of one name apart where their calls are recorded.

    Args:
      limits: of one call.
      python: path of the interpreter, whose environment's packages the code can import; by default the one beneath this
        process's environment.
      visible: further files and folders that the code may read, at the same paths. Where this process is root, the
        code runs as another user: they have to be readable by all.
      isolation: `bwrap` or `unshare`; by default the first that works here.
      unsafe: runs the code as a plain subprocess where no isolation works: it can read, write and reach all that this
        process can.

    Raises:
      ValueError: no isolation works here, or a setting makes no sense; the message says why and what to do.
    """

    name = "python"
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "code": {"type": "string", "minLength": 1, "maxLength": MOST_CHARACTERS, "description": "a whole program"}
        },
        "required": ["code"],
        "additionalProperties": False,
    }

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        python: str | None = None,
        visible: Sequence[str] = (),
        isolation: str | None = None,
        unsafe: bool = False,
        scope: str = "",
    ) -> None:
        self.limits = limits or SandboxLimits()
        self.scope = scope
        self._interpreter = interpreter(python)
        self._visible = tuple(visible)
        self.isolation = _found(python, self._visible, isolation, unsafe)
        self._command: Callable[..., Command] = isolations().get(self.isolation, no_isolation)

    @property
    def description(self) -> str:
        """What the policy is told of it."""
        return (
            "Runs Python code in a new interpreter and shows what it prints, and the value of a last expression. There "
            f"is no network; variables and files do not outlast the call. At most {self.limits.seconds:g} seconds."
        )

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Runs one program; see the class."""
        command = self._command(self._interpreter, self._visible, self.limits)
        return _result(await run(command, arguments["code"], self.limits), self.limits)


def _result(ended: Ended, limits: SandboxLimits) -> ToolResult:
    output = ended.output.rstrip("\n")
    if ended.kind is None:
        return ToolResult(output or EMPTY_OUTPUT)
    if ended.kind == "sandbox":
        return failed("sandbox", f"Error: the sandbox does not start: {ended.detail}", "infrastructure")
    if ended.kind == "exception":
        return failed("exception", output)
    says = {
        "exit": f"exit status {ended.detail}",
        "killed": f"killed by {ended.detail or 'a signal'}",
        "timeout": f"stopped after {limits.seconds:g} s",
        "memory": f"more than {limits.memory_mib} MiB of memory",
        "processes": f"more than {limits.processes} processes and threads",
        "files": f"files above {limits.file_mib} MiB each, or {limits.folder_mib} MiB together",
        "output_limit": f"stopped after {limits.output_bytes} bytes of output",
    }
    return failed(ended.kind, "\n".join(filter(None, [output, f"Error: {says[ended.kind]}."])))


def _found(python: str | None, visible: tuple[str, ...], wanted: str | None, unsafe: bool) -> str:
    """The first isolation that works."""
    if wanted is not None and wanted not in isolations():
        raise ValueError(f"isolation is {wanted!r}; choose among {', '.join(isolations())}")
    problems = []
    for name in isolations():
        if wanted in (None, name):
            problem = _problem(name, python, visible)
            if problem is None:
                return name
            problems.append(f"{name}: {problem}")
    if not unsafe:
        raise ValueError(
            f"the python tool finds no isolation that works here ({'; '.join(problems)}); install bubblewrap (0.7 or "
            "later) and allow user namespaces (sysctl kernel.unprivileged_userns_clone, user.max_user_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns; in a container, its seccomp profile), or set unsafe=True to "
            "run what the policy writes without any"
        )
    warning = "The python tool runs what the policy writes without isolation (%s)."
    logging.log_first_n(logging.WARNING, warning, 1, "; ".join(problems))
    return "none"


@functools.cache
def _problem(isolation: str, python: str | None, visible: tuple[str, ...]) -> str | None:
    """Why a program does not run in this isolation; None if it does. Tried once."""
    limits = SandboxLimits()
    ended = _waited(isolations()[isolation](interpreter(python), visible, limits), limits)
    if ended.kind is None and ended.output == "42\n":
        return None
    return f"{ended.detail or ended.output or ended.kind}"


def _waited(command: Command, limits: SandboxLimits) -> Ended:
    """The end of a small program, in a thread with a loop of its own: the caller may be within a running one."""
    ended = []
    thread = threading.Thread(target=lambda: ended.append(asyncio.run(run(command, "6 * 7", limits))))
    thread.start()
    thread.join()
    return ended[0]
