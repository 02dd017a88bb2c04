"""Where metrics go beside metrics.jsonl: TensorBoard and W&B, both extras, which never end a run.

A record's numbers become curves `<phase>/<key>` over the record's `update`; text and lists have none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from absl import logging

from agentr1_jax import files
from agentr1_jax.errors import UserError

Record = Mapping[str, Any]
"""A line of metrics.jsonl."""
MODES = ("online", "offline")


class Sink(Protocol):
    """What takes records. Whatever its methods raise ends the sink, with one warning, and not the run."""

    name: str

    def open(self, kept: Sequence[Record], written: int) -> None:
        """Begins, at a start of the run.

        Args:
          kept: the records that the run goes on from; those that an earlier start wrote after them are dropped.
          written: one more than the index of the last record that any start has written; 0 for none.
        """
        ...

    def write(self, record: Record) -> None:
        """Takes one record more."""
        ...

    def close(self) -> None:
        """Ends it; no more records come."""
        ...


class Guarded:
    """A sink that is left alone once it failed."""

    def __init__(self, sink: Sink) -> None:
        self._sink: Sink | None = sink

    def open(self, kept: Sequence[Record], written: int) -> None:
        self._try("open", kept, written)

    def write(self, record: Record) -> None:
        self._try("write", record)

    def close(self) -> None:
        self._try("close")

    def _try(self, method: str, *args: Any) -> None:
        if self._sink is None:
            return
        try:
            getattr(self._sink, method)(*args)
        except Exception as error:
            logging.warning(
                "%s: %s failed (%s: %s); it gets no more metrics in this start, metrics.jsonl has them all",
                *(self._sink.name, method, type(error).__name__, error),
            )
            self._sink = None


class TensorBoard:
    """Event files, one for each start of the run; it repeats what the run goes on from, and viewers drop the earlier.

    So curves have no update twice. Earlier files stay: a viewer that is reading one would not get past its end.

    Args:
      folder: of the event files, on this machine.
    """

    name = "tensorboard"

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def open(self, kept: Sequence[Record], written: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        os.makedirs(self._folder, exist_ok=True)
        name = f"events.out.tfevents.{time.time():017.6f}"  # Viewers go from file to file in this order.
        self._out = RecordWriter(open(os.path.join(self._folder, name), "wb"))
        self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))
        # What was read from the files before is forgotten.
        self._put(Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START)))
        for record in kept:
            self._add(record)
        self._out.flush()

    def write(self, record: Record) -> None:
        self._add(record)
        self._out.flush()

    def close(self) -> None:
        self._out.close()

    def _add(self, record: Record) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in curves(record).items()]
        step = int(record.get("update", record["index"]))
        self._put(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _put(self, event: Any) -> None:
        self._out.write(event.SerializeToString())


class WandB:
    """A run of Weights & Biases. Its id is kept in the run's folder, so that a resumed run goes on in it.

    What W&B was told cannot be taken back: records that a resumed run writes again are not sent again.

    Args:
      run_dir: the run's folder, which gives the run its name; local files of W&B go there, or where it is in a bucket
        to a temporary folder.
      project: of W&B.
      mode: one of `MODES`; offline files are sent by `wandb sync`.
      config: of the run, as plain JSON.
    """

    name = "wandb"

    def __init__(self, run_dir: str, project: str, mode: str, config: Mapping[str, Any]) -> None:
        self._run_dir, self._project, self._mode, self._config = run_dir, project, mode, config

    def open(self, kept: Sequence[Record], written: int) -> None:
        import wandb

        path = os.path.join(self._run_dir, "wandb.json")
        began = files.exists(path)
        known: dict[str, Any] = {"id": uuid.uuid4().hex[:12], "next": 0}
        if began:
            known = json.loads(files.read_bytes(path))
        remote = files.is_remote(self._run_dir)
        self._run = wandb.init(
            project=self._project,
            id=known["id"],
            resume="allow",
            name=os.path.basename(os.path.normpath(self._run_dir)),
            mode=self._mode,  # type: ignore[arg-type]
            dir=tempfile.mkdtemp(prefix="wandb") if remote else self._run_dir,
            config=dict(self._config),
            settings=wandb.Settings(console="off"),
        )
        # Records of starts before the sink was turned on are sent now; those of starts with it are there.
        self._next = max(known["next"], written if began else 0, self._run.step)
        with files.published(path) as out:
            json.dump({"id": known["id"], "next": self._next}, out)
        for record in kept:
            self.write(record)

    def write(self, record: Record) -> None:
        if record["index"] < self._next:
            return
        phase = _phase(record)
        update = {f"{phase}/update": record["update"]} if "update" in record else {}
        if update:
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/update")
        self._run.log(curves(record) | update, step=record["index"])
        self._next = record["index"] + 1

    def close(self) -> None:
        self._run.finish()


def curves(record: Record) -> dict[str, float]:
    """The numbers of a record by the names of their curves, those of nested records by paths; `nan` and `inf` too."""
    phase = _phase(record)
    # Evaluations have phases of their own: eval/em, eval_sampled/em.
    return {
        f"{phase}/{name.removeprefix('eval/')}": value
        for name, value in _numbers(record)
        if name not in ("index", "update")
    }


def make_sinks(
    run_dir: str, tensorboard: bool, wandb_project: str, wandb_mode: str, config: Mapping[str, Any]
) -> list[Sink]:
    """The sinks that a config asks for; see `check_sinks` for what is refused."""
    board: list[Sink] = [TensorBoard(os.path.join(run_dir, "tensorboard"))] if tensorboard else []
    return [*board, WandB(run_dir, wandb_project, wandb_mode, config)] if wandb_project else board


def check_sinks(run_dir: str, tensorboard: bool, wandb_project: str, wandb_mode: str) -> None:
    """Refuses sinks that cannot work.

    Raises:
      UserError: an extra is not installed, there is no such mode, or a bucket cannot hold the files.
    """
    for wanted, package in ((tensorboard, "tensorboard"), (wandb_project, "wandb")):
        if wanted and importlib.util.find_spec(package) is None:
            key = "sinks.tensorboard" if package == "tensorboard" else "sinks.wandb_project"
            raise UserError(
                f"{key} is {wanted!r}, and {package} is not installed: pip install 'agentr1_jax[{package}]'"
            )
    if wandb_mode not in MODES:
        raise UserError(f"unknown sinks.wandb_mode {wandb_mode!r}; choose one of {', '.join(MODES)}")
    if tensorboard and files.is_remote(run_dir):
        raise UserError(
            f"sinks.tensorboard appends to files, which the bucket of run_dir ({run_dir}) cannot; set it to False"
        )
    if wandb_project and wandb_mode == "offline" and files.is_remote(run_dir):
        raise UserError(
            f"sinks.wandb_mode=offline leaves files to send later in run_dir, and {run_dir} is in a bucket; set it to "
            "online"
        )


def _phase(record: Record) -> str:
    return str(record.get("phase", "run"))


def _numbers(record: Record, prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) or value in ("nan", "inf", "-inf"):
            yield f"{prefix}{key}", float(value)
