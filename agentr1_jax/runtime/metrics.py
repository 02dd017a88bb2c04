"""Metrics of a run: one JSON object per line in `metrics.jsonl`, without gaps or repetitions after a resume.

Sinks (`runtime/sinks.py`) receive the same records; the file is authoritative.

A file on a disk is appended to; an object in a bucket is written anew at every checkpoint and now and then. Records
that a kill loses are later than the last checkpoint, and the resumed run writes them again.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Literal, Protocol

import numpy as np
from absl import logging
from pydantic.dataclasses import dataclass

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.validation import STRICT

REWRITE_SECONDS = 30.0
"""Least time between two writes of an object in a bucket, in seconds."""

Record = Mapping[str, Any]
"""One line of metrics.jsonl."""


@dataclass(frozen=True, config=STRICT)
class SinksConfig:
    """Receivers of metrics beside metrics.jsonl: section `sinks` of a config.

    Attributes:
      tensorboard: write event files to `tensorboard/` in the run folder; needs the extra `tensorboard`.
      wandb_project: project of Weights & Biases; empty for none; needs the extra `wandb`.
      wandb_mode: send records at once (`online`), or write files that `wandb sync` sends later (`offline`).
    """

    tensorboard: bool = False
    wandb_project: str = ""
    wandb_mode: Literal["online", "offline"] = "online"

    @property
    def active(self) -> bool:
        """True if metrics go anywhere else; `runtime/sinks.py` is needed only then."""
        return self.tensorboard or bool(self.wandb_project)


class Sink(Protocol):
    """Receiver of records."""

    name: str

    def open(self, records: Sequence[Record], next_index: int) -> None:
        """Begin a start of the run.

        Args:
          records: records before the checkpoint that the run resumes from; later ones of earlier starts are dropped.
          next_index: one more than the largest index that any earlier start has written; 0 if there is none.
        """
        ...

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Writer of `run_dir/metrics.jsonl`; a context that closes it.

    Every record gets an `index`, counted from 0 without gaps. A checkpoint stores `next_index`. A writer opened with it
    drops the records after that checkpoint, which the resumed run writes again. A new run starts at 0.

    Args:
      run_dir: run folder, made if need be.
      next_index: index that the checkpoint stored; records from this index on are dropped.
      enabled: True in exactly one process, which writes.
      sinks: further receivers of every record; one that fails is not used any more.

    Attributes:
      next_index: index of the next record; the same in every process, also where `enabled` is False.

    Raises:
      UserError: a line of an existing file is not a record.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], next_index: int, enabled: bool = True, sinks: Sequence[Sink] = ()
    ) -> None:
        self.next_index = next_index
        self._out: IO[str] | _BucketFile | None = None
        self._sinks = list(sinks) if enabled else []
        if enabled:
            path = os.path.join(run_dir, "metrics.jsonl")
            records, next_written = _drop_records_from(path, next_index)
            if files.is_remote(path):
                self._out = _BucketFile(path)
            else:
                os.makedirs(run_dir, exist_ok=True)
                self._out = open(path, "a", encoding="utf-8")
            self._tell_sinks("open", records, next_written)

    def write(self, record: Record) -> None:
        """Append a record of scalars, strings, and nested dicts or lists of them.

        Non-finite numbers become the strings `nan`, `inf` and `-inf`, which `float` reads back.
        """
        plain = _plain({"index": self.next_index, **record})
        line = json.dumps(plain, ensure_ascii=False, allow_nan=False)
        self.next_index += 1
        if self._out is not None:
            self._out.write(line + "\n")
            self._out.flush()
        self._tell_sinks("write", plain)

    def sync(self) -> None:
        """Store all records so far; call it before a checkpoint stores `next_index`."""
        if isinstance(self._out, _BucketFile):
            self._out.rewrite()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._out is not None:
            self._out.close()
        self._tell_sinks("close")

    def _tell_sinks(self, method: str, *args: Any) -> None:
        for sink in list(self._sinks):
            try:
                getattr(sink, method)(*args)
            except Exception as error:
                logging.warning(
                    "%s: %s failed (%s: %s); it gets no more metrics in this start, metrics.jsonl has them all",
                    *(sink.name, method, type(error).__name__, error),
                )
                self._sinks.remove(sink)


class _BucketFile:
    """Text of an object in a bucket, which is written whole: at most every `REWRITE_SECONDS`, or by `rewrite`."""

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
            with files.atomic_write(self._path) as out:
                out.write(self._text)
            self._written = len(self._text)
        self._due = time.monotonic() + REWRITE_SECONDS

    def close(self) -> None:
        self.rewrite()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read all records of a metrics file, without an unfinished last line that a kill left.

    Raises:
      UserError: another line is not a record; the message names file and line.
    """
    *lines, _unfinished = files.read_bytes(path).split(b"\n")
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


def _drop_records_from(path: str, next_index: int) -> tuple[list[dict[str, Any]], int]:
    """Rewrite a metrics file with only the records whose `index < next_index`.

    Returns:
      those records; one more than the largest index there was before, 0 if there was none.
    """
    if not files.exists(path):
        return [], 0
    before = read_metrics(path)
    records = [record for record in before if record["index"] < next_index]
    with files.atomic_write(path) as out:
        out.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return records, max((record["index"] + 1 for record in before), default=0)


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
        # `tolist` of bfloat16 arrays gives objects that JSON cannot write.
        return _plain(array.tolist() if array.dtype.kind in "biu" else array.astype(np.float64).tolist())
    raise TypeError(
        f"a metric is a number, a string, or dicts and lists of them, not {type(value).__name__}: {value!r}"
    )
