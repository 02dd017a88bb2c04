"""Tools that an MCP server offers."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentr1_jax.contrib.mcp.connection import ServerAddress
from agentr1_jax.contrib.mcp.session import CallError, Session
from agentr1_jax.tools.base import ToolResult, failure
from agentr1_jax.tools.schemas import check_schema

EMPTY_RESULT = "No result."


class McpTool:
    """A tool of an MCP server; `prefix` and the server's name for it are its name.

    A result's text parts are joined by line ends; an image, a sound or a resource is only named. What the server calls
    an error is a fault of the model, `tool_error`; `bad_arguments` too. Faults of the infrastructure are
    `connection_lost` (the next call connects again), `timeout`, `server_error`, `bad_answer` and `closed`.
    """

    def __init__(self, tool: Any, prefix: str, session: Session) -> None:
        self.name = prefix + tool.name
        self.description = tool.description or ""
        self.parameters: Mapping[str, Any] = tool.input_schema
        self._remote, self._session = tool.name, session

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Ask the server."""
        try:
            answer = await self._session.call(self._remote, arguments)
        except CallError as error:
            return failure(error.kind, f"Error: {self.name}: {error}", error.fault)
        text = "\n".join(_text(part) for part in answer.content) or EMPTY_RESULT
        return failure("tool_error", text) if answer.is_error else ToolResult(text)


class McpTools(Sequence[McpTool]):
    """The tools of an MCP server, as a sequence. Connects at once.

    Calls may come from many trajectories and event loops at once; they share one connection. A server that dies in
    mid-call fails the calls that wait for it and is started, or reached, again by the next one. It ends with `close`,
    with a `with` block, or at the latest with this process.

    Args:
      server: program and arguments of a server that speaks over its stdin and stdout, or the URL of one that speaks
        streamable HTTP.
      environment: of the program, beside PATH, HOME and the like; all else of this process's is kept from it.
      folder: in which the program runs.
      headers: of the requests, such as an authorisation.
      only: names of the tools to offer; all of them by default.
      prefix: stands before each name, where several servers have tools of one name.
      start_seconds: for starting or reaching the server, greeting it, and its list of tools, each.
      seconds: for a call.

    Raises:
      ValueError: the library mcp is missing, a setting makes no sense, or no server answers properly: a program that is
        missing, ends at once or writes garbage, a URL where nobody answers, a tool whose schema is none or refers to
        another file or URL. The message names it and says why.
    """

    def __init__(
        self,
        server: Sequence[str] | str,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        headers: Mapping[str, str] | None = None,
        only: Sequence[str] = (),
        prefix: str = "",
        start_seconds: float = 30.0,
        seconds: float = 60.0,
    ) -> None:
        command, url = ((), server) if isinstance(server, str) else (server, "")
        address = ServerAddress(command, url, environment or {}, folder, headers or {})
        for name, value in {"start_seconds": start_seconds, "seconds": seconds}.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be finite and above 0")
        self._session = Session(address, start_seconds, seconds)
        try:
            offered = _choose_tools(address, self._session.tools, only)
        except BaseException:
            self.close()
            raise
        self._tools = [McpTool(tool, prefix, self._session) for tool in offered]

    def close(self) -> None:
        """End the connection, and the server where this started it; later calls fail with `closed`."""
        self._session.close()

    def __enter__(self) -> McpTools:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._tools)

    def __getitem__(self, index: Any) -> Any:
        return self._tools[index]


def _choose_tools(address: ServerAddress, tools: Sequence[Any], only: Sequence[str]) -> list[Any]:
    """Return the tools in `only`, else all. Raises ValueError where one is missing, or unusable."""
    names = collections.Counter(tool.name for tool in tools)
    missing = [name for name in only if name not in names]
    if missing or not tools:
        raise ValueError(f"MCP server {address} has no tool {', '.join(missing)}; it has {', '.join(names) or 'none'}")
    offered = [tool for tool in tools if not only or tool.name in only]
    for tool in offered:
        if names[tool.name] > 1:
            raise ValueError(
                f"MCP server {address} has {names[tool.name]} tools named {tool.name!r}; leave it out by `only`"
            )
        try:
            check_schema(tool.input_schema)
        except ValueError as error:
            why = f"the schema of tool {tool.name!r} cannot be used: {error}; leave it out by `only`"
            raise ValueError(f"MCP server {address}: {why}") from error
    return offered


def _text(part: Any) -> str:
    """Return a part of a result as text."""
    if part.type == "text":
        return str(part.text)
    if part.type in ("image", "audio"):
        return f"[{part.type} of type {part.mime_type}, not shown]"
    where = part.resource.uri if part.type == "resource" else part.uri
    return f"[resource {where}, not shown]"
