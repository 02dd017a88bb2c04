"""Reader of files of JSON records, one a line or all in one array, plain or gzipped."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, EOFError, OSError, zlib.error, RecursionError)
"""What reading a damaged file, or a record that is not what it should be, may raise."""

_GZIP = b"\x1f\x8b"
_CHUNK, _MOST_OF_A_RECORD = 1 << 20, 1 << 24  # characters
_BLANKS = " \t\r\n"
_SPACE = re.compile(f"[{_BLANKS}]*")
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def read_records(path: str | os.PathLike[str], what: str) -> Iterator[tuple[str, Any]]:
    """Yield the JSON values of a file, each behind its place: `file, line 1`, or `file, record 1` of an array.

    Empty lines count as lines and are left out. `what` is the complaint about a bad record, e.g. `not a question`.

    Raises:
      ValueError: the file cannot be read on; the message names the place.
    """
    path = os.fspath(path)
    number, unit = 1, "line"
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == _GZIP
        with gzip.open(path) if packed else open(path, "rb") as file:
            stream = cast(BinaryIO, file)
            array = stream.read(_CHUNK).decode("utf-8-sig", "replace").lstrip(_BLANKS).startswith("[")
            stream.seek(0)
            unit = "record" if array else "line"
            for record in _elements(stream) if array else _lines(stream):
                if record is not None:
                    yield f"{path}, {unit} {number}", record[0]
                number += 1
    except DAMAGE as error:
        raise damage_error(f"{path}, {unit} {number}", what, error) from error


def damage_error(where: str, what: str, error: BaseException) -> ValueError:
    """Return the error that says where a file is not `what` it should be, why, and what to do."""
    return ValueError(f"{where}: {what} ({type(error).__name__}: {error}); repair or download the file again")


def _lines(stream: BinaryIO) -> Iterator[tuple[Any] | None]:
    """Yield each line's JSON; None for an empty line."""
    for line in stream:
        text = line.decode("utf-8-sig")
        yield (_whole(json.loads(text), text),) if text.strip() else None


def _elements(stream: BinaryIO) -> Iterator[tuple[Any]]:
    """Yield the elements of one JSON array, one at a time: HotpotQA's training file has 570 MB."""
    with io.TextIOWrapper(stream, "utf-8-sig", newline="") as file:
        yield from _elements_of(file)


def _elements_of(file: io.TextIOBase) -> Iterator[tuple[Any]]:
    decode = json.JSONDecoder().raw_decode
    text, at = "", 0

    def mark() -> str:
        """Return the next character that is no white space, "" at the end."""
        nonlocal text, at
        while (at := cast(re.Match[str], _SPACE.match(text, at)).end()) == len(text):
            text, at = file.read(_CHUNK), 0
            if not text:
                return ""
        return text[at]

    def element() -> Any:
        nonlocal text, at
        mark()
        while True:
            try:
                record, end = decode(text, at)
            except json.JSONDecodeError:
                # Cut by the chunk's end, or damaged: only more of the text can tell.
                more = file.read(_CHUNK) if len(text) - at < _MOST_OF_A_RECORD else ""
                if not more:
                    raise
                text, at = text[at:] + more, 0
            else:
                record, at = _whole(record, text[at:end]), end
                return record

    mark()
    at += 1
    if mark() != "]":
        yield (element(),)
        while mark() == ",":
            at += 1
            yield (element(),)
    if mark() != "]":
        raise ValueError(f"the array goes on with {mark()!r}, not with a comma or its closing bracket")
    at += 1
    if mark():
        raise ValueError(f"there is {mark()!r} behind the array's closing bracket")


def _whole(record: Any, text: str) -> Any:
    """Return the record of a JSON text. Raises ValueError where it has half a surrogate pair: no text ends so."""
    if _HALF_OF_A_PAIR.search(text):
        json.dumps(record, ensure_ascii=False).encode()
    return record
