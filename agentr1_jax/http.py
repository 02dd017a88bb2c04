"""One HTTP request of JSON, in time or not at all."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import threading
import urllib.parse

MOST_BYTES = 32 << 20
"""Longest answer that is read."""
MOST_PAUSE = 30.0
"""Longest pause before another attempt, in seconds."""
PASSING = ("timeout", "unreachable", "http_429", "http_5xx")
"""Kinds of failures that may not come again."""
_SHOWN = 200  # characters of an answer that an error quotes


class HttpError(Exception):
    """A request that brought nothing.

    Attributes:
      kind: `timeout`, `unreachable` (no connection, or one that broke), `http_429`, `http_5xx`, `http_error` (any other
        status but 200) or `huge_answer`.
      status: of the answer; 0 where there was none.
      answer: its body.
    """

    def __init__(self, kind: str, message: str, status: int = 0, answer: bytes = b"") -> None:
        super().__init__(message)
        self.kind, self.status, self.answer = kind, status, answer


def is_http(url: str) -> bool:
    """Whether a URL names a server of HTTP or HTTPS."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def pause(backoff: float, retry: int) -> float:
    """Seconds before retry n: u · min(backoff · 2ⁿ⁻¹, 30) s, ½ <= u < 1."""
    return random.uniform(0.5, 1) * min(backoff * 2.0 ** (retry - 1), MOST_PAUSE)


def request(method: str, url: str, body: bytes | None, seconds: float) -> bytes:
    """What a server answers with status 200. Proxies are not used, redirects not followed.

    Args:
      method: GET or POST.
      url: of the server, with path and query.
      body: JSON; None for none.
      seconds: from the first byte of the request to the last of its answer; connecting may take as long again.

    Raises:
      HttpError: see the class.
    """
    parts = urllib.parse.urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connect(parts.hostname or "", parts.port, timeout=seconds)
    target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    expired = threading.Event()
    timer = threading.Timer(seconds, _expire, [connection, expired])
    timer.daemon = True
    try:
        connection.connect()
        timer.start()  # The socket's own limit is for each packet: a server that trickles would never meet it.
        connection.request(method, target, body, {"Content-Type": "application/json", "Accept": "application/json"})
        response = connection.getresponse()
        answer = response.read(MOST_BYTES + 1)
        if len(answer) <= MOST_BYTES and response.length:  # A limited read is silent about what is missing.
            raise http.client.IncompleteRead(answer, response.length)
    except Exception as error:
        if expired.is_set() or isinstance(error, TimeoutError):
            raise HttpError("timeout", f"{url} did not answer within {seconds:g} s") from error
        raise HttpError("unreachable", f"{url}: {type(error).__name__}: {error}") from error
    finally:
        timer.cancel()
        connection.close()
    if expired.is_set():  # A connection that is shut down may read as a short answer.
        raise HttpError("timeout", f"{url} did not answer within {seconds:g} s")
    if response.status != 200:
        status = response.status
        kind = "http_429" if status == 429 else "http_5xx" if status >= 500 else "http_error"
        raise HttpError(kind, f"{url} answered status {status}: {shown(answer)}", status, answer)
    if len(answer) > MOST_BYTES:
        raise HttpError("huge_answer", f"{url} answered more than {MOST_BYTES:,} bytes")
    return answer


def shown(answer: bytes) -> str:
    """The beginning of an answer, for a message."""
    return repr(answer[:_SHOWN].decode("utf-8", "replace"))


def _expire(connection: http.client.HTTPConnection, expired: threading.Event) -> None:
    expired.set()
    with contextlib.suppress(AttributeError, OSError):  # It may be closed by now.
        connection.sock.shutdown(socket.SHUT_RDWR)  # Wakes the thread that reads; `close` would not.
