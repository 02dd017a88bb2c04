"""One HTTP request of JSON within a total time limit, by httpx; and a small server of JSON, by the standard library."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import io
import json
import logging as python_logging
import os
import random
import re
import signal
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from absl import logging

from agentr1_jax.errors import HIDDEN, VARIABLE, UserError, hide_credentials

if TYPE_CHECKING:
    import httpx

MAX_BYTES = 32 << 20
"""Length of an answer, or of a request to a server; longer ones are not read."""
REQUEST_SECONDS = 30.0
"""Time in which a server must have the whole of a request, from its connection on."""
MOST_CONNECTIONS = 768
"""Connections that a server has at once, a thread and a file for each, of the 1024 files that a process may usually
have; more are answered status 503."""
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


def with_credentials(url: str) -> str:
    """Return a URL with the values of the environment variables that it names, as in https://user:$PASSWORD@host.

    Raises:
      ValueError: a variable is not set, or the URL is one whose credentials were hidden.
    """
    if HIDDEN in url:
        raise ValueError(
            f"{url}: credentials are stored in no file; write the names of environment variables in place of {HIDDEN}, "
            "as in https://user:$PASSWORD@host (for a stored run, in its config.json)"
        )

    def value(variable: re.Match[str]) -> str:
        name = variable[0].strip("${}")
        if (found := os.environ.get(name)) is None:
            raise ValueError(f"{hide_credentials(url)}: the environment variable {name} is not set")
        return urllib.parse.quote(found, safe="")

    return re.sub(VARIABLE, value, url)


def retry_pause(backoff: float, retry: int) -> float:
    """Return the seconds before retry n: u · min(backoff · 2ⁿ⁻¹, 30) s, ½ <= u < 1."""
    return random.uniform(0.5, 1) * min(backoff * 2.0 ** (retry - 1), MAX_PAUSE)


def request(method: str, url: str, body: bytes | None, seconds: float) -> bytes:
    """Return the answer of a server with status 200. Proxies are not used, redirects not followed.

    Blocks the calling thread. The request runs on an event loop of its own, where one time limit holds for all of it:
    the limits of sockets and of httpx are for each packet, and a server that trickles would never meet them.

    Args:
      method: GET or POST.
      url: address of the server, with path and query; see `with_credentials`.
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

    answer, address, url = bytearray(), with_credentials(url), hide_credentials(url)
    try:
        async with (
            asyncio.timeout(seconds),
            _client().stream(method, address, content=body, headers=_HEADERS) as response,
        ):
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

    python_logging.getLogger("httpx").setLevel(python_logging.WARNING)  # It logs URLs with their credentials.
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


class Refusal(Exception):
    """A request that a server answers with another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def make_server(routes: Mapping[str, Callable[..., Mapping[str, Any]]], host: str, port: int) -> ThreadingHTTPServer:
    """Return a server of JSON objects, a thread for each request; to be run by `serve_forever` or `serve`.

    The fields of a request's body, or of its query, are the arguments of the function that answers it. An error is
    answered by `{"error": sentence}`: 400 for a body that is no JSON object or has other fields, 404 for an unknown
    path, 408 and 413 for one that is too slow or too long, 500 for an exception, which is logged, 503 for one too many.

    Args:
      routes: method and path, e.g. `POST /reset` -> function, which may raise Refusal.
      host: address to listen at.
      port: port to listen at; 0 takes a free one.

    Raises:
      UserError: it cannot listen there.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS  # for writing the answer

        def setup(self) -> None:
            super().setup()
            self.rfile.close()
            self.rfile = io.BufferedReader(_Received(self.connection, time.monotonic() + REQUEST_SECONDS))

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            self._answer(path, lambda: dict(urllib.parse.parse_qsl(query)))

        def do_POST(self) -> None:
            self._answer(self.path, lambda: json.loads(self._read_body()))

        def _answer(self, path: str, read: Callable[[], Any]) -> None:
            try:
                if f"{self.command} {path}" not in routes:
                    raise Refusal(404, f"no {self.command} {path}; there are {', '.join(routes)}")
                function = routes[f"{self.command} {path}"]
                status, body = 200, json.dumps(function(**_arguments(function, read))).encode()
            except Refusal as error:
                status, body = error.status, _error_body(error)
            except ConnectionError:  # The client is gone.
                return
            except Exception as error:
                logging.exception("%s failed", path)
                status, body = 500, _error_body(f"{type(error).__name__}: {error}")
            self.connection.settimeout(self.timeout)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _read_body(self) -> bytes:
            length = self.headers.get("Content-Length") or "0"
            if not length.isdecimal() or int(length) > MAX_BYTES:
                raise Refusal(413, f"Content-Length is {length!r:.30}; a request has at most {MAX_BYTES:,} bytes")
            try:
                body = self.rfile.read(int(length))
            except TimeoutError as error:
                raise Refusal(408, f"the request did not arrive within {REQUEST_SECONDS:g} s") from error
            if len(body) < int(length):
                raise ConnectionError("the client is gone")
            return body

        def log_message(self, format: str, *args: Any) -> None:
            logging.debug(format, *args)

    try:
        return _Server((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen at {host}:{port} ({error}); choose another port or address") from error


class _Server(ThreadingHTTPServer):
    """A server that has no more than `MOST_CONNECTIONS` at once."""

    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.send(b"HTTP/1.0 503 Too many connections\r\n\r\n")
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # No thread could be started.
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logging.debug("a connection broke", exc_info=True)


class _Received(io.RawIOBase):
    """What comes over a connection until an end in time, however slowly; then TimeoutError."""

    def __init__(self, connection: socket.socket, end: float) -> None:
        self._connection, self._end = connection, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(max(self._end - time.monotonic(), 1e-3))
        return self._connection.recv_into(buffer)


def _error_body(error: object) -> bytes:
    return json.dumps({"error": str(error)}).encode()


def _arguments(function: Callable[..., Any], read: Callable[[], Any]) -> Mapping[str, Any]:
    try:
        arguments: Mapping[str, Any] = read()
        inspect.signature(function).bind(**arguments)
    except (ValueError, TypeError, RecursionError) as error:
        raise Refusal(400, f"cannot be read: {error}") from error
    return arguments


def serve(server: ThreadingHTTPServer) -> None:
    """Serve until SIGTERM or Ctrl-C, then answer the requests that have begun."""
    server.daemon_threads = False  # So that closing waits for their answers.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    with server:
        server.serve_forever()
    logging.info("stopped")
