"""One writer of metrics: a JSON object a line in `metrics.jsonl`, without a seam where a run was resumed.

Sinks (`runtime/sinks.py`) are told what the file was told; the file is the truth.

A local file is appended to. An object in a bucket cannot be: it is written anew with every checkpoint, and else at most
every `REWRITE_SECONDS`. What a kill takes with it then lies behind the checkpoint, and is written again by the resumed
run.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime.sinks import Guarded, Sink

REWRITE_SECONDS = 30.0


class MetricsWriter:
    """Appends records to `run_dir/metrics.jsonl`.

    Every record gets an `index`, counting from 0 without gaps. A checkpoint stores `next_index`; opened with it, the
    file loses the records that came after that checkpoint, and the resumed run writes them anew. A new run starts at 0.

    Attributes:
      next_index: index of the next record; the same in every process, also where `enabled` is False.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], next_index: int, enabled: bool = True, sinks: Sequence[Sink] = ()
    ) -> None:
        """Opens the file, and the sinks.

        Args:
          run_dir: folder of the run; made if need be.
          next_index: as stored by the checkpoint that the run goes on from; records from there on are dropped.
          enabled: whether this process writes; exactly one of several does.
          sinks: what is told every record too; one that fails is left alone from then on.

        Raises:
          UserError: a line of an existing file is not a record.
        """
        self.next_index = next_index
        self._out: IO[str] | _Rewritten | None = None
        self._sinks: list[Guarded] = []
        if enabled:
            path = os.path.join(run_dir, "metrics.jsonl")
            kept, written = truncate(path, next_index)
            if files.is_remote(path):
                self._out = _Rewritten(path)
            else:
                os.makedirs(run_dir, exist_ok=True)
                self._out = open(path, "a", encoding="utf-8")
            self._sinks = [Guarded(sink) for sink in sinks]
            for sink in self._sinks:
                sink.open(kept, written)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record of scalars, strings and nested dicts or lists of them, and flushes it.

        Non-finite numbers become the strings `nan`, `inf` and `-inf`, which `float` reads back.
        """
        plain = _plain({"index": self.next_index, **record})
        line = json.dumps(plain, ensure_ascii=False, allow_nan=False)
        self.next_index += 1
        if self._out is not None:
            self._out.write(line + "\n")
            self._out.flush()
        for sink in self._sinks:
            sink.write(plain)

    def save(self) -> None:
        """Sees that all records so far are where they will be looked for; call it before a checkpoint counts them."""
        if isinstance(self._out, _Rewritten):
            self._out.rewrite()

    def close(self) -> None:
        """Closes the file and the sinks; writing afterwards is an error."""
        if self._out is not None:
            self._out.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Rewritten:
    """Lines of an object in a bucket: those it has, and what is added."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._text = files.read_bytes(path).decode() if files.exists(path) else ""
        self._written, self._due = len(self._text), 0.0

    def write(self, text: str) -> None:
        self._text += text

    def flush(self) -> None:
        if time.monotonic() >= self._due:
            self.rewrite()

    def rewrite(self) -> None:
        if len(self._text) > self._written:
            with files.published(self._path) as out:
                out.write(self._text)
            self._written = len(self._text)
        self._due = time.monotonic() + REWRITE_SECONDS

    def close(self) -> None:
        self.rewrite()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a metrics file; a last line cut short by a kill is left out.

    Raises:
      UserError: another line is not a record; the message names file and line.
    """
    *lines, _cut_short = files.read_bytes(path).split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            record["index"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{os.fspath(path)}, line {number}: not a record of metrics ({type(error).__name__}: {error}); "
                "delete the line or restore the file"
            ) from error
        records.append(record)
    return records


def truncate(path: str | os.PathLike[str], next_index: int) -> tuple[list[dict[str, Any]], int]:
    """Keeps the records with `index < next_index`, by putting a shorter copy in place.

    Returns:
      those that are kept; one more than the last index there was before, 0 where there was none.
    """
    if not files.exists(path):
        return [], 0
    found = read_metrics(path)
    kept = [record for record in found if record["index"] < next_index]
    with files.published(path) as out:
        out.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
    return kept, max((record["index"] + 1 for record in found), default=0)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        # bfloat16 has no Python scalar of its own: its `tolist` gives objects that JSON does not know.
        return _plain(array.tolist() if array.dtype.kind in "biu" else array.astype(np.float64).tolist())
    raise TypeError(
        f"a metric is a number, a string, or dicts and lists of them, not {type(value).__name__}: {value!r}"
    )
