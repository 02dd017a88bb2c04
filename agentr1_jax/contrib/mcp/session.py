"""A session with an MCP server: a thread with an event loop of its own, to which all calls are submitted."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from agentr1_jax.contrib.mcp.connection import Connection, ServerAddress
from agentr1_jax.errors import hide_credentials
from agentr1_jax.tools.base import Fault

T = TypeVar("T")

CLOSING_SECONDS = 15.0
SILENT_SECONDS = 5.0
"""How long nothing may come back to anybody before a call that is given up takes the connection with it."""
MAX_PAGES = 100
"""Of a list of tools."""
_QUOTED = 500  # characters of an error that a message quotes


class CallError(Exception):
    """Kind, fault and message of the ToolResult that stands for a call without result."""

    def __init__(self, kind: str, message: str, fault: Fault = "infrastructure") -> None:
        super().__init__(message)
        self.kind = kind
        self.fault: Fault = fault


class Session:
    """Connects at the start, and again with the first call after a connection was lost.

    Each rollout has its own event loop, while a connection belongs to one: it lives here, in a thread that all share.

    Args:
      start_seconds: limit on the start of the server, and on the list of its tools.
      seconds: limit on a call.

    Attributes:
      tools: those that the server offers, as the library has them.

    Raises:
      ValueError: the library is missing, or no server answers properly; the message names it and says why.
    """

    def __init__(self, address: ServerAddress, start_seconds: float, seconds: float) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ValueError("MCP servers need the library mcp: pip install 'agentr1_jax[mcp]'") from error
        self._address, self._start_seconds, self._seconds = address, start_seconds, seconds
        self._connection: Connection | None = None
        self._attempt: asyncio.Task[Connection] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._last_answer = 0.0
        self._closed = False
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="mcp")
        self._thread.start()
        atexit.register(self.close)
        try:
            self.tools = self._submit(self._list_tools()).result()
        except CallError as error:
            self.close()
            raise ValueError(f"MCP server {address}: {error}") from error
        except BaseException:
            self.close()
            raise

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Return the answer to a call, as the library has it, on any event loop. Raises CallError."""
        return await asyncio.wrap_future(self._submit(self._call_tool(tool, arguments)))

    def close(self) -> None:
        """End the connection, and a server that it started. Calls in flight fail; may be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        try:
            ending.result(CLOSING_SECONDS)
        except concurrent.futures.TimeoutError:
            ending.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise CallError("closed", "the session was closed")

    async def _list_tools(self) -> list[Any]:
        connection = await self._get_connection()
        tools: list[Any] = []
        cursor = None
        try:
            async with asyncio.timeout(self._start_seconds):
                for _ in range(MAX_PAGES):
                    page = await connection.client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if not cursor:
                        break
        except Exception as error:
            raise self._failure(connection, error, "listing its tools") from error
        return tools

    async def _call_tool(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        connection = await self._get_connection()
        start = time.monotonic()
        try:
            # The library's own limit is for each round of a call.
            async with asyncio.timeout(self._seconds):
                result = await connection.client.call_tool(tool, dict(arguments))
        except asyncio.CancelledError:
            # The caller has a shorter limit than ours, or a run ends; only a server that answers nobody hangs.
            if self._last_answer < start and time.monotonic() - start > SILENT_SECONDS:
                self._drop(connection)
            raise
        except Exception as error:
            failure = self._failure(connection, error, "a call")
            silent = failure.kind == "timeout" and self._last_answer < start
            if failure.kind == "connection_lost" or silent:
                self._drop(connection)
            raise failure from error
        self._last_answer = time.monotonic()
        return result

    async def _get_connection(self) -> Connection:
        """Return the open connection; calls that find none wait for one and the same attempt to open it."""
        if self._connection is not None and not self._connection.alive:
            self._drop(self._connection)
        if self._connection is not None:
            return self._connection
        if self._attempt is None:
            self._attempt = asyncio.create_task(self._connect())
            self._attempt.add_done_callback(lambda task: task.cancelled() or task.exception())  # Nobody may wait.
        return await asyncio.shield(self._attempt)

    async def _connect(self) -> Connection:
        connection = Connection(self._address)
        try:
            await connection.open(self._start_seconds)
        except Exception as error:
            self._drop(connection)
            raise self._failure(connection, error, "the start") from error
        finally:
            self._attempt = None
        self._connection = connection
        return connection

    def _drop(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None
        closing = asyncio.create_task(connection.drop())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _end(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()
            await asyncio.wait([self._attempt])
        if self._connection is not None:
            self._drop(self._connection)
        if self._closing:
            await asyncio.wait(self._closing)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _failure(self, connection: Connection, error: Exception, doing: str) -> CallError:
        """Return the typed failure that stands for what the library raised."""
        import mcp_types
        import pydantic
        from mcp import MCPError

        output = f"; it wrote: {connection.output.strip()[-_QUOTED:]!r}" if connection.output.strip() else ""
        said = hide_credentials(f"{type(error).__name__}: {error}")[:_QUOTED]
        if isinstance(error, TimeoutError):
            seconds = self._seconds if doing == "a call" else self._start_seconds
            return CallError("timeout", f"{doing} took more than {seconds:g} s{output}")
        if isinstance(error, FileNotFoundError) and not self._address.url:
            return CallError("connection_lost", f"no such program or folder ({error}); install it, or name its path")
        if isinstance(error, pydantic.ValidationError | RuntimeError):
            return CallError("bad_answer", f"{doing}: it answers what no MCP server does ({said}){output}")
        if isinstance(error, MCPError):
            message = error.message[:_QUOTED]
            if error.code in (mcp_types.INVALID_PARAMS, mcp_types.METHOD_NOT_FOUND):
                return CallError("bad_arguments", message, "model")
            if error.code == mcp_types.INTERNAL_ERROR:
                return CallError("server_error", f"{doing} failed: {message}{output}")
            if error.code == mcp_types.PARSE_ERROR:
                return CallError("bad_answer", f"{doing}: {message}{output}")
        return CallError("connection_lost", f"the connection ended in {doing} ({said}){output}")
