"""Run the cells of a grid as processes: a share of the cores each, started in order, stopped together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from agentr1_jax import files
from agentr1_jax.runtime.processes import HUGE_PAGES, StopRequest
from agentr1_jax.train import build
from configs import resolved
from experiments.ablation.grid import Cell, is_finished, write_config

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_BETWEEN_LINES = 60.0
TAIL_BYTES = 1 << 17
"""Of metrics.jsonl, read for the progress of a run."""
LOG_LINES = 12
"""Of a failed run's log, shown with the failure."""


@dataclasses.dataclass(frozen=True)
class Running:
    """A running process and its cores."""

    cell: Cell
    process: subprocess.Popen[bytes]
    cores: frozenset[int]


def run_all(
    cells: Sequence[Cell], *, parallel: int, stop: StopRequest, console: Console, program: Sequence[str] = ()
) -> dict[Cell, str]:
    """Run all unfinished cells in order, `parallel` at once; a run waits for the one that it starts from.

    That one may be among the cells of another machine, which tells by a file beside the folder if it fails. Once a stop
    is requested nothing more is started, and running processes are asked to save and leave, and waited for.

    Returns:
      the runs that failed, each with the end of its log or why it was not started.
    """
    command = program or (sys.executable, "-m", "experiments.train")
    waiting, running, failed = [cell for cell in cells if not cell.is_finished], list[Running](), dict[Cell, str]()
    free, stopping, began = core_shares(parallel), False, time.time()
    show = make_show(console)
    try:
        while running or (waiting and not stop.requested):
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                free.append(job.cores)
                if fault := fault_of(job, stop.requested):
                    failed[job.cell] = fault
                    with files.atomic_write(failure_path(job.cell.folder)) as out:
                        out.write(fault)
                show(f"{title(job.cell)}: {'failed' if fault else status(job.cell)}", running)
            ready = [cell for cell in waiting if not cell.after or is_finished(cell.after)]
            for cell in ready[: 0 if stop.requested else len(free)]:
                running.append(start(cell, free.pop(0), command))
                waiting.remove(cell)
                show(f"{title(cell)}: starts in {cell.folder}", running)
            broken = {cell.folder for cell in failed}
            hopeless = [c for c in waiting if c.after and (c.after in broken or has_failed_since(c.after, began))]
            failed |= dict.fromkeys(hopeless, "not started, since its warm start failed")
            waiting = [cell for cell in waiting if cell not in hopeless]
            if stop.requested and not stopping:
                stopping = True
                show("stopping; what runs saves and leaves", running)
                for job in running:
                    job.process.terminate()
            show("", running)
            time.sleep(SECONDS_BETWEEN_LOOKS if running or waiting else 0)
    finally:
        for job in running:  # Left over only where something broke, or a second Ctrl-C came.
            job.process.kill()
            job.process.wait()
    return failed


def core_shares(parallel: int) -> list[frozenset[int]]:
    """Return the cores of each of `parallel` processes: equal shares, or shared cores where there are too few.

    Empty sets where the system binds no processes to cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [frozenset()] * parallel
    cores = sorted(os.sched_getaffinity(0))
    if parallel > len(cores):
        return [frozenset({cores[i % len(cores)]}) for i in range(parallel)]
    edges = [len(cores) * i // parallel for i in range(parallel + 1)]
    return [frozenset(cores[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def start(cell: Cell, cores: frozenset[int], command: Sequence[str]) -> Running:
    """Start or resume a run; its output is appended to the log beside its folder."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(failure_path(cell.folder))
    if not os.path.exists(os.path.join(cell.folder, "config.json")):
        build.remove_tokenizer(cell.folder)  # Of a start that was killed before the run began.
    arguments = [*command, f"--config={resolved.__file__}:{write_config(cell)}"]
    environment = {"GLIBC_HUGE_PAGESS": HUGE_PAGES, **os.environ}  # Else it would start twice.
    with open(log_path(cell), "ab") as log, bind_to_cores(cores):
        # A group of its own: Ctrl-C is for this process, which passes it on as SIGTERM.
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, process_group=0
        )
    return Running(cell, process, cores)


@contextlib.contextmanager
def bind_to_cores(cores: frozenset[int]) -> Iterator[None]:
    """Bind this thread, and the processes that it starts, to some cores; do nothing for none."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def fault_of(job: Running, stopping: bool) -> str:
    """Return why a run that has ended failed; "" if it did not."""
    code = job.process.returncode
    if (job.cell.is_finished and code == 0) or (stopping and code in (0, -signal.SIGTERM)):
        return ""
    ended = f"exit status {code}" if code >= 0 else f"ended by signal {-code}"
    with open(log_path(job.cell), encoding="utf-8", errors="replace") as lines:
        last = "".join(lines.readlines()[-LOG_LINES:]).rstrip()
    return f"{ended} without a summary; {log_path(job.cell)} ends with\n{last}"


def failure_path(folder: str) -> str:
    """Return the file that tells the other machines of a grid why a run failed."""
    return f"{folder}.failed"


def has_failed_since(folder: str, since: float) -> bool:
    """Return True if a machine has said since then, in seconds since 1970, that the run of a folder failed."""
    try:
        return os.path.getmtime(failure_path(folder)) >= since
    except FileNotFoundError:
        return False


def log_path(cell: Cell) -> str:
    """Return the log of a run; it lies beside the folder, which must be empty when the run begins."""
    return f"{cell.folder}.log"


def title(cell: Cell) -> str:
    """Return arm and seed as text."""
    return f"{cell.arm} seed {cell.seed}"


def status(cell: Cell) -> str:
    """Return phase, update and last score of a run, from the end of its metrics."""
    phase, update, em = "set-up", 0, None
    for record in reversed(last_records(cell.folder)):
        for key in ("eval/em", "rollout/em"):
            em = record.get(key, em) if em is None else em
        if phase == "set-up" and record.get("phase") in ("warm_start", "rl"):
            phase, update = record["phase"], record["update"]
    if cell.is_finished:
        phase = "finished"
    total = {"warm_start": cell.settings.warm_start.updates, "rl": cell.settings.run.updates}.get(phase)
    where = phase.replace("_", " ") + (f" {update}/{total}" if total else "")
    return where if em is None else f"{where}  em {float(em):.3f}"


def last_records(folder: str) -> list[dict[str, Any]]:
    """Return the last records of a metrics file that is being written; [] where there is none."""
    try:
        with open(os.path.join(folder, "metrics.jsonl"), "rb") as raw:
            raw.seek(max(0, os.fstat(raw.fileno()).st_size - TAIL_BYTES))
            lines = raw.read().split(b"\n")
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):  # The first and the last may be cut.
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def make_show(console: Console) -> Callable[[str, Sequence[Running]], None]:
    """Return `show(event, running)`, which prints an event, and each minute the status of what runs."""
    last = time.monotonic()

    def show(event: str, running: Sequence[Running]) -> None:
        nonlocal last
        lines = [event] if event else []
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            lines += [f"{title(job.cell)}: {status(job.cell)}" for job in running]
        for line in lines:
            console.print(Text(line), soft_wrap=True)

    return show
