"""One connection to an MCP server, by the official client library."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from agentr1_jax.errors import hide_credentials

_CONNECT_SECONDS = 30.0
_MAX_OUTPUT = 2000  # characters of a server's output beside the protocol, the last ones


@dataclasses.dataclass(frozen=True)
class ServerAddress:
    """A command to start a server and talk over its stdin and stdout, or the URL of a running one; see `McpTools`.

    Raises:
      ValueError: neither or both are given, or the URL is none.
    """

    command: Sequence[str]
    url: str
    environment: Mapping[str, str]
    folder: str | None
    headers: Mapping[str, str]

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError(
                f"an MCP server is a command, as a list of program and arguments, or a url; given are {self.command!r} "
                f"and {hide_credentials(self.url)!r}"
            )
        parts = urllib.parse.urlsplit(self.url)
        if self.url and not (parts.scheme in ("http", "https") and parts.hostname):
            raise ValueError(
                f"{hide_credentials(self.url)!r} is no URL of an MCP server; it must be like http://localhost:8000/mcp"
            )

    def __str__(self) -> str:
        return hide_credentials(self.url) or " ".join(self.command)


class Connection:
    """One connection, open until it is dropped, for use on one event loop.

    Attributes:
      client: of the library.
      output: output of the server beside the protocol: its stderr, and lines of its stdout that were no message.
    """

    def __init__(self, address: ServerAddress) -> None:
        self.client: Any = None
        self.output = ""
        self._address = address
        self._ending = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    async def open(self, seconds: float) -> None:
        """Start or reach the server and initialise the protocol.

        Raises:
          Exception: whatever went wrong; TimeoutError after `seconds`.
        """
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(ready))
        try:
            async with asyncio.timeout(seconds):
                self.client = await ready
        except BaseException:
            self._life.cancel()
            raise

    @property
    def alive(self) -> bool:
        """True until the connection ends."""
        return self._life is not None and not self._life.done()

    async def drop(self) -> None:
        """End the connection, and a server that it started."""
        self._ending.set()
        if self._life is not None:
            await asyncio.wait([self._life])

    async def _live(self, ready: asyncio.Future[Any]) -> None:
        """Open, hold and close the connection in one task: the library's scopes may not be left by another."""
        try:
            async with _client(self._address, self._add_output) as client:
                if not ready.done():
                    ready.set_result(client)
                await self._ending.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(_innermost(error))

    def _add_output(self, text: str) -> None:
        self.output = (self.output + text)[-_MAX_OUTPUT:]


@contextlib.asynccontextmanager
async def _client(address: ServerAddress, on_output: Callable[[str], None]) -> AsyncIterator[Any]:
    """Yield a connected client of the library."""
    import httpx2
    import mcp  # An extra.
    import pydantic
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    # It logs a traceback for each line that is no message; errors quote what a server wrote.
    logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)

    async def on_message(message: Any) -> None:
        if isinstance(message, pydantic.ValidationError):
            on_output(f"{message.errors()[0]['input']}\n")

    async with contextlib.AsyncExitStack() as stack:
        if address.url:
            timeout = httpx2.Timeout(_CONNECT_SECONDS, read=None)  # Calls have a limit of their own.
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=dict(address.headers), timeout=timeout))
            transport = streamable_http_client(address.url, http_client=http)
        else:
            program, *arguments = address.command
            server = mcp.StdioServerParameters(
                command=program, args=arguments, env=dict(address.environment), cwd=address.folder
            )
            transport = stdio_client(server, stack.enter_context(_output_pipe(on_output)))
        client = await stack.enter_async_context(mcp.Client(transport, message_handler=on_message))
        # Structured results are not used; patterns in their schema could hold up the whole process.
        client.session.validate_tool_result = _accept_result  # type: ignore[method-assign]
        yield client


async def _accept_result(name: str, result: Any) -> None:
    """Stand in for the library's validation of structured results."""


@contextlib.contextmanager
def _output_pipe(on_output: Callable[[str], None]) -> Any:
    """Yield a file whose content goes to `on_output`: a server's stderr would else be that of the run."""
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    loop = asyncio.get_running_loop()

    def read() -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(reads, 1 << 16)
            on_output(data.decode("utf-8", "replace"))
            if not data:
                loop.remove_reader(reads)

    loop.add_reader(reads, read)
    try:
        with open(writes, "w") as file:
            yield file
    finally:
        read()
        loop.remove_reader(reads)
        os.close(reads)


def _innermost(error: BaseException) -> BaseException:
    """Return the first cause within groups of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
