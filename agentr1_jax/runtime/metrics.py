"""Metrics of a run: one JSON object per line in `metrics.jsonl`, without gaps or repetitions after a resume.

Sinks (`runtime/sinks.py`) receive the same records; the file is authoritative.

A file on a disk is appended to; an object in a bucket is written anew at every checkpoint and now and then. Records
that a kill loses are later than the last checkpoint, and the resumed run writes them again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import IO, Any, Literal, Protocol

import numpy as np
from pydantic.dataclasses import dataclass

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime.bucket import BucketFile
from agentr1_jax.validation import STRICT

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
    """Receiver of records; `runtime/sinks.py` has some."""

    name: str

    def open(self, records: Sequence[Record], next_index: int) -> None:
        """Begin a start of the run.

        Args:
          records: records before the checkpoint that the run resumes from; later ones of earlier starts are dropped.
          next_index: one more than the largest index that any earlier start has written; 0 if there is none.
        """
        ...

    def write(self, record: Record) -> None:
        """Receive the next record."""
        ...

    def close(self) -> None:
        """End the sink; there are no more records."""
        ...


class MetricsWriter:
    """Writer of `run_dir/metrics.jsonl`.

    Every record gets an `index`, counted from 0 without gaps. A checkpoint stores `next_index`. A writer opened with it
    drops the records after that checkpoint, which the resumed run writes again. A new run starts at 0.

    Attributes:
      next_index: index of the next record; the same in every process, also where `enabled` is False.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], next_index: int, enabled: bool = True, sinks: Sequence[Sink] = ()
    ) -> None:
        """Open the file and the sinks.

        Args:
          run_dir: run folder, made if need be.
          next_index: index that the checkpoint stored; records from this index on are dropped.
          enabled: True in exactly one process, which writes.
          sinks: further receivers of every record.

        Raises:
          UserError: a line of an existing file is not a record.
        """
        self.next_index = next_index
        self._out: IO[str] | BucketFile | None = None
        self._sinks: Sequence[Sink] = sinks if enabled else ()
        if enabled:
            path = os.path.join(run_dir, "metrics.jsonl")
            records, next_written = drop_records_from(path, next_index)
            if files.is_remote(path):
                self._out = BucketFile(path)
            else:
                os.makedirs(run_dir, exist_ok=True)
                self._out = open(path, "a", encoding="utf-8")
            for sink in self._sinks:
                sink.open(records, next_written)

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
        for sink in self._sinks:
            sink.write(plain)

    def sync(self) -> None:
        """Store all records so far; call it before a checkpoint stores `next_index`."""
        if isinstance(self._out, BucketFile):
            self._out.rewrite()

    def close(self) -> None:
        """Close the file and the sinks."""
        if self._out is not None:
            self._out.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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


def drop_records_from(path: str | os.PathLike[str], next_index: int) -> tuple[list[dict[str, Any]], int]:
    """Replace a metrics file by a copy that has only the records with `index < next_index`.

    Returns:
      the records of the copy; one more than the largest index there was before, 0 if there was none.
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
