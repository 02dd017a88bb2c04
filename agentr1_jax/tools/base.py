"""The Tool contract: a tool says *what happened*; what it means for the task is the environment's business."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import jsonschema

Fault = Literal["model", "infrastructure"]


@dataclasses.dataclass(frozen=True)
class ToolError:
    """Why a call failed and whose fault it was.

    Attributes:
      kind: a short typed name, e.g. `unknown_tool`, `bad_arguments`, `exception`, `timeout`.
      fault: `model` errors go back to the policy as an observation; `infrastructure` errors are retried.
    """

    kind: str
    fault: Fault


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """The result of one call.

    Attributes:
      content: text shown to the policy.
      ok: False if the call failed.
      error: set exactly where `ok` is False.
      reward: an own reward of the tool, None if it gives none.
      data: machine-readable details for the environment (e.g. passage ids); never shown to the policy.
    """

    content: str
    ok: bool = True
    error: ToolError | None = None
    reward: float | None = None
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Tool(Protocol):
    """A tool: a name, a description, a JSON Schema of its arguments, and `execute`, sync or async."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def execute(self, arguments: Mapping[str, Any]) -> ToolResult | Awaitable[ToolResult]:
        """Runs the call. `arguments` have been validated against `parameters`."""
        ...


def failed(kind: str, content: str, fault: Fault = "model") -> ToolResult:
    """A failed call, with the text that the policy will read."""
    return ToolResult(content=content, ok=False, error=ToolError(kind, fault))


def schema(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates expect it: `{"type": "function", "function": {...}}`."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def argument_error(tool: Tool, arguments: Any) -> str | None:
    """What is wrong with `arguments` by the tool's schema, in one line; None if nothing is."""
    validator = jsonschema.Draft202012Validator(dict(tool.parameters))
    error = next(iter(sorted(validator.iter_errors(arguments), key=lambda e: list(map(str, e.absolute_path)))), None)
    return None if error is None else error.message


async def call(tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
    """Validates and executes one call; an exception inside the tool becomes a typed result.

    An exception of the tool's own code is an infrastructure fault: the policy could not have known better.
    """
    problem = argument_error(tool, arguments)
    if problem is not None:
        return failed("bad_arguments", f"Error: bad arguments for {tool.name}: {problem}")
    try:
        result = tool.execute(arguments)
        return await result if inspect.isawaitable(result) else result
    except Exception as error:  # Nothing that a tool does may end the batch.
        return failed("exception", f"Error: {tool.name} raised {type(error).__name__}: {error}", "infrastructure")
