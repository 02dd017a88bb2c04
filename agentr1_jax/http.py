"""One HTTP request of JSON within a total time limit, by httpx."""

from __future__ import annotations

import asyncio
import functools
import random
import ssl
import threading
import urllib.parse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

MAX_BYTES = 32 << 20
"""Length of an answer; longer ones are not read."""
MAX_PAUSE = 30.0
"""Longest pause before another attempt, in seconds."""
TRANSIENT_KINDS = ("timeout", "unreachable", "http_429", "http_5xx")
"""Kinds of failures that another attempt may not meet."""
_QUOTED = 200  # characters of an answer that an error quotes
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}


class HttpError(Exception):
    """A request without a good answer.

    Attributes:
      kind: `timeout`, `unreachable` (no connection, or one that broke), `http_429`, `http_5xx`, `http_error` (any other
        status but 200) or `huge_answer`.
      status: status of the answer; 0 where there was none.
      answer: body of the answer.
    """

    def __init__(self, kind: str, message: str, status: int = 0, answer: bytes = b"") -> None:
        super().__init__(message)
        self.kind, self.status, self.answer = kind, status, answer


def is_http_url(url: str) -> bool:
    """Return True for the URL of a server of HTTP or HTTPS."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def retry_pause(backoff: float, retry: int) -> float:
    """Return the seconds before retry n: u · min(backoff · 2ⁿ⁻¹, 30) s, ½ <= u < 1."""
    return random.uniform(0.5, 1) * min(backoff * 2.0 ** (retry - 1), MAX_PAUSE)


def request(method: str, url: str, body: bytes | None, seconds: float) -> bytes:
    """Return the answer of a server with status 200. Proxies are not used, redirects not followed.

    Blocks the calling thread. The request runs on an event loop of its own, where one time limit holds for all of it:
    the limits of sockets and of httpx are for each packet, and a server that trickles would never meet them.

    Args:
      method: GET or POST.
      url: address of the server, with path and query.
      body: JSON; None for none.
      seconds: time limit, from connecting to the last byte of the answer.
    """
    answer = asyncio.run_coroutine_threadsafe(_request(method, url, body, seconds), _loop())
    try:
        return answer.result()
    finally:
        answer.cancel()  # Where this thread was interrupted.


def quote(answer: bytes) -> str:
    """Return the beginning of an answer, for a message."""
    return repr(answer[:_QUOTED].decode("utf-8", "replace"))


async def _request(method: str, url: str, body: bytes | None, seconds: float) -> bytes:
    import httpx  # Here, because it is slow to import and most runs make no request.

    answer = bytearray()
    try:
        async with asyncio.timeout(seconds), _client().stream(method, url, content=body, headers=_HEADERS) as response:
            async for part in response.aiter_raw():
                answer += part
                if len(answer) > MAX_BYTES:
                    raise HttpError("huge_answer", f"{url} answered more than {MAX_BYTES:,} bytes")
    except TimeoutError as error:
        raise HttpError("timeout", f"{url} did not answer within {seconds:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise HttpError("unreachable", f"{url}: {type(error).__name__}: {error}") from error
    status, whole = response.status_code, bytes(answer)
    if status != 200:
        kind = "http_429" if status == 429 else "http_5xx" if status >= 500 else "http_error"
        raise HttpError(kind, f"{url} answered status {status}: {quote(whole)}", status, whole)
    return whole


@functools.cache
def _client() -> httpx.AsyncClient:
    """Return the client of all requests. Each has a connection of its own: none breaks for having been idle."""
    import httpx

    return httpx.AsyncClient(
        verify=ssl.create_default_context(),
        trust_env=False,
        timeout=None,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all requests, which runs in a thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="http").start()
    return loop
