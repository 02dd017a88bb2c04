"""Sinks: where metrics go beside metrics.jsonl. TensorBoard and Weights & Biases, both extras.

The numbers of a record become curves `<phase>/<key>` over the record's `update`; text and lists have no curve.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime.metrics import Record, Sink, SinksConfig

FLUSH_SECONDS = 5
"""Time after which TensorBoard's files have what was written, in seconds."""


def check_sinks(settings: SinksConfig, run_dir: str) -> None:
    """Refuse sinks that cannot work for this run folder.

    Raises:
      UserError: an extra is not installed, or a bucket cannot hold the files.
    """
    for key, value, extra, package in (
        ("tensorboard", settings.tensorboard, "tensorboard", "tensorboardX"),
        ("wandb_project", settings.wandb_project, "wandb", "wandb"),
    ):
        if value and importlib.util.find_spec(package) is None:
            raise UserError(
                f"sinks.{key} is {value!r}, and {package} is not installed: pip install 'agentr1_jax[{extra}]'"
            )
    if settings.tensorboard and files.is_remote(run_dir):
        raise UserError(
            f"sinks.tensorboard appends to files, which the bucket of run_dir ({run_dir}) cannot; set it to False"
        )
    if settings.wandb_project and settings.wandb_mode == "offline" and files.is_remote(run_dir):
        raise UserError(
            f"sinks.wandb_mode=offline leaves files to send later in run_dir, and {run_dir} is in a bucket; set it "
            "to online"
        )


def make_sinks(settings: SinksConfig, run_dir: str, config: Mapping[str, Any]) -> list[Sink]:
    """Make the sinks that the settings ask for, which passed `check_sinks`; W&B shows the resolved config."""
    sinks: list[Sink] = []
    if settings.tensorboard:
        sinks.append(TensorBoard(os.path.join(run_dir, "tensorboard")))
    if settings.wandb_project:
        sinks.append(WandB(run_dir, settings.wandb_project, settings.wandb_mode, config))
    return sinks


class TensorBoard:
    """Event files in a folder on a disk, one for each start of the run.

    Each file begins with the records that the run resumes from, and tells viewers to forget the earlier files
    (`purge_step=0`): phases count their updates from 0, so that no later step would divide old from new. Earlier files
    stay, since a viewer that is reading one would not get past its end.
    """

    name = "tensorboard"

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def open(self, records: Sequence[Record], next_index: int) -> None:
        import tensorboardX

        self._writer = tensorboardX.SummaryWriter(
            self._folder,
            purge_step=0,
            max_queue=0,  # Unlimited: the run never waits for a disk.
            flush_secs=FLUSH_SECONDS,
            # File names hold whole seconds, and viewers read files in the order of names.
            filename_suffix=f".{time.time_ns() % 10**9:09d}",
        )
        for record in records:
            self.write(record)

    def write(self, record: Record) -> None:
        step = int(record.get("update", record["index"]))
        for tag, value in curves(record).items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Run of Weights & Biases, which a resumed run continues.

    W&B cannot take records back: those that a resumed run writes again are not sent again. The run's id is stored in
    `wandb.json` in the run folder. W&B's local files go there too, or to a temporary folder if it is in a bucket.
    """

    name = "wandb"

    def __init__(self, run_dir: str, project: str, mode: str, config: Mapping[str, Any]) -> None:
        self._run_dir, self._project, self._mode, self._config = run_dir, project, mode, config

    def open(self, records: Sequence[Record], next_index: int) -> None:
        import wandb

        path = os.path.join(self._run_dir, "wandb.json")
        resumes = files.exists(path)
        stored: dict[str, Any] = {"id": uuid.uuid4().hex[:12], "next": 0}
        if resumes:
            stored = json.loads(files.read_bytes(path))
        self._run = wandb.init(
            project=self._project,
            id=stored["id"],
            resume="allow",
            name=os.path.basename(os.path.normpath(self._run_dir)),
            mode=self._mode,  # type: ignore[arg-type]
            dir=tempfile.mkdtemp(prefix="wandb") if files.is_remote(self._run_dir) else self._run_dir,
            config=dict(self._config),
            settings=wandb.Settings(console="off"),
        )
        # Starts before the sink was turned on sent nothing: their records are sent now. An offline run does not know
        # its step, which is why the index is stored.
        self._next = max(stored["next"], next_index if resumes else 0, self._run.step)
        with files.atomic_write(path) as out:
            json.dump({"id": stored["id"], "next": self._next}, out)
        for record in records:
            self.write(record)

    def write(self, record: Record) -> None:
        if record["index"] < self._next:
            return
        values = curves(record)
        if "update" in record:
            phase = _phase(record)
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/update")
            values[f"{phase}/update"] = record["update"]
        self._run.log(values, step=record["index"])
        self._next = record["index"] + 1

    def close(self) -> None:
        self._run.finish()


def curves(record: Record) -> dict[str, float]:
    """Return the numbers of a record, `nan` and `inf` too, by the names of their curves; nested keys become paths."""
    phase = _phase(record)
    # Evaluations are phases of their own: the key eval/em is the curve eval/em or eval_sampled/em.
    return {
        f"{phase}/{name.removeprefix('eval/')}": value
        for name, value in _numbers(record)
        if name not in ("index", "update")
    }


def _phase(record: Record) -> str:
    return str(record.get("phase", "run"))


def _numbers(record: Record, prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) or value in ("nan", "inf", "-inf"):
            yield f"{prefix}{key}", float(value)
