"""Where an MCP server is, and one connection to it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

_CONNECT_SECONDS = 30.0
_MOST_SAID = 2000  # characters of what a server said beside the protocol, the last ones


@dataclasses.dataclass(frozen=True)
class Place:
    """A server: a command to start it and talk over its stdin and stdout, or the URL of a running one.

    Attributes:
      command: program and arguments; empty for a server behind a URL.
      url: of a server that speaks streamable HTTP.
      environment: of the program, beside PATH, HOME and the like.
      folder: in which the program runs.
      headers: of the requests.

    Raises:
      ValueError: neither or both are given, or the URL is none.
    """

    command: Sequence[str] = ()
    url: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    folder: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or bool(self.command) == bool(self.url):
            raise ValueError(
                f"an MCP server is a command, as a list of program and arguments, or a url; given are {self.command!r} "
                f"and {self.url!r}"
            )
        parts = urllib.parse.urlsplit(self.url)
        if self.url and not (parts.scheme in ("http", "https") and parts.hostname):
            raise ValueError(f"{self.url!r} is no URL of an MCP server; it must be like http://localhost:8000/mcp")

    def __str__(self) -> str:
        return self.url or " ".join(self.command)


class Connection:
    """One connection, open until it is dropped. To be used on one event loop.

    Attributes:
      client: of the library.
      words: what the server wrote beside the protocol: its stderr, and lines of its stdout that were no message.
    """

    def __init__(self, place: Place) -> None:
        self.client: Any = None
        self.words = ""
        self._place = place
        self._ending = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    async def open(self, seconds: float) -> None:
        """Starts or reaches the server and greets it.

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
        """Whether it has not come to its end by itself."""
        return self._life is not None and not self._life.done()

    def drop(self) -> None:
        """Lets the connection end; a server that it started ends, too."""
        self._ending.set()

    async def closed(self) -> None:
        """Waits until nothing of it is left."""
        if self._life is not None:
            await asyncio.wait([self._life])

    async def _live(self, ready: asyncio.Future[Any]) -> None:
        """The connection's life, in one task since the library's scopes may not be left by another."""
        try:
            async with _client(self._place, self._heard) as client:
                if not ready.done():
                    ready.set_result(client)
                await self._ending.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(_innermost(error))

    def _heard(self, text: str) -> None:
        self.words = (self.words + text)[-_MOST_SAID:]


@contextlib.asynccontextmanager
async def _client(place: Place, heard: Callable[[str], None]) -> AsyncIterator[Any]:
    """A client of the library, connected."""
    import httpx2
    import mcp  # An extra.
    import pydantic
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    # It logs a traceback for each line that is no message; errors quote what a server wrote.
    logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)

    async def on_message(message: Any) -> None:
        if isinstance(message, pydantic.ValidationError):
            heard(f"{message.errors()[0]['input']}\n")

    async with contextlib.AsyncExitStack() as stack:
        if place.url:
            timeout = httpx2.Timeout(_CONNECT_SECONDS, read=None)  # Calls have a limit of their own.
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=dict(place.headers), timeout=timeout))
            transport = streamable_http_client(place.url, http_client=http)
        else:
            program, *arguments = place.command
            server = mcp.StdioServerParameters(
                command=program, args=arguments, env=dict(place.environment), cwd=place.folder
            )
            transport = stdio_client(server, stack.enter_context(_listened(heard)))
        yield await stack.enter_async_context(mcp.Client(transport, message_handler=on_message))


@contextlib.contextmanager
def _listened(heard: Callable[[str], None]) -> Any:
    """A file that passes on what is written to it: a server's stderr would else be that of the run."""
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    loop = asyncio.get_running_loop()

    def read() -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(reads, 1 << 16)
            heard(data.decode("utf-8", "replace"))
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
    """The first cause within groups of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
