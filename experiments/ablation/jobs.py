"""Run the cells of a grid as processes: a share of the cores each, started in order, stopped together.

Commands that share the folder of a grid split it by claims: whoever holds the kernel's lock on the file `seed0.claim`
beside a run's folder makes the run. A lock ends with the processes that hold it, so that the others resume the run of a
command that was killed. The run inherits the lock: it stays claimed where the command alone was killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import filelock
from absl import logging
from rich.console import Console
from rich.text import Text

from agentr1_jax import files
from agentr1_jax.runtime.lock import NO_LOCKS
from agentr1_jax.runtime.processes import HUGE_PAGES, StopRequest
from agentr1_jax.train import build
from configs import resolved
from experiments.ablation.grid import Cell, is_finished, write_config

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_LINES = 60.0
TAIL_BYTES = 1 << 17
"""Of metrics.jsonl, read for the progress of a run."""
LOG_LINES = 12
"""Of a failed run's log, shown with the failure."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """Right of this command to make a run, or to write the results; a context that gives it back."""

    lock: filelock.BaseFileLock | None
    descriptors: Sequence[int] = ()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        if self.lock is None:
            return
        # filelock leaves the file, and takes no lock of a file that is gone. It is ours unless the folder was replaced.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.lock.lock_file), os.fstat(self.descriptors[0])):
                os.unlink(self.lock.lock_file)
        self.lock.release()


@dataclasses.dataclass(frozen=True)
class Running:
    """A running process, its cores, and the claim of its run."""

    cell: Cell
    process: subprocess.Popen[bytes]
    cores: frozenset[int]
    claim: Claim


def claim(place: str, seconds: float = 0.0) -> Claim | None:
    """Return the claim of what lies at a path, or of the folder there; None if another command holds it so long.

    On a file system without locks everything can be claimed, with a warning.
    """
    path, descriptors = claim_path(place), list[int]()

    def write_owner(descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        descriptors.append(descriptor)

    os.makedirs(os.path.dirname(path), exist_ok=True)
    lock = filelock.FileLock(path, timeout=seconds, fallback_to_soft=False, on_acquired=write_owner)
    try:
        lock.acquire()
    except filelock.Timeout:
        return None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logging.warning("%s: no locks here; give each command that shares the folder a --share of its own", path)
        return Claim(None)
    return Claim(lock, descriptors)


def claim_path(place: str) -> str:
    """Return the file whose lock is the claim of a path."""
    return f"{place}.claim"


def owner_of(place: str) -> str:
    """Return who has claimed a path, as text."""
    try:
        return files.read_bytes(claim_path(place)).decode() or "another command"
    except FileNotFoundError:
        return "another command"


def run_all(
    cells: Sequence[Cell], *, parallel: int, stop: StopRequest, console: Console, program: Sequence[str] = ()
) -> dict[Cell, str]:
    """Run all unfinished cells in order, `parallel` at once; a run waits for the one that it starts from.

    Other commands may run cells of the same folder at the same time. What another one has claimed is waited for, and
    taken over where it ends without a result. A failure is told to the others by a file beside the folder; only a later
    command tries that run again. Once a stop is requested nothing more is started, and running processes are asked to
    save and leave, and waited for.

    Returns:
      the runs that failed, here or elsewhere, each with the end of its log or why it was not started.
    """
    command = program or (sys.executable, "-m", "experiments.train")
    waiting, running, failed = [cell for cell in cells if not cell.is_finished], list[Running](), dict[Cell, str]()
    free, stopping, told, began = core_shares(parallel), False, False, time.time()
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
                with job.claim:  # Given back after the others can read that it failed.
                    show(f"{job.cell.title}: {'failed' if fault else status(job.cell)}", running)
            broken = {cell.folder for cell in failed}
            for cell in waiting:
                if cell.after and (cell.after in broken or failure_since(cell.after, began)):
                    failed[cell] = "not started, since its warm start failed"
                elif fault := failure_since(cell.folder, began):
                    failed[cell] = f"in another command: {fault}"
            waiting = [cell for cell in waiting if cell not in failed and not cell.is_finished]
            for cell in [cell for cell in waiting if not cell.after or is_finished(cell.after)]:
                if not free or stop.requested:
                    break
                if (own := claim(cell.folder)) is None:
                    continue
                if cell.is_finished or failure_since(cell.folder, began):
                    with own:  # The other command has given it back in the meantime.
                        continue
                running.append(start(cell, free.pop(0), command, own))
                waiting.remove(cell)
                show(f"{cell.title}: starts in {cell.folder}", running)
            if stop.requested and not stopping:
                stopping = True
                show("stopping; what runs saves and leaves", running)
                for job in running:
                    job.process.terminate()
            alone = waiting and not running and not stop.requested
            show("the other runs are made elsewhere; waits for them" if alone and not told else "", running, waiting)
            told = told or bool(alone)
            time.sleep(SECONDS_BETWEEN_LOOKS if running or waiting else 0)
    finally:
        for job in running:  # Left over only where something broke, or a second Ctrl-C came.
            job.process.kill()
            job.process.wait()
            with job.claim:
                pass
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


def start(cell: Cell, cores: frozenset[int], command: Sequence[str], own: Claim) -> Running:
    """Start or resume a run; its output is appended to the log beside its folder."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(failure_path(cell.folder))
    if not os.path.exists(os.path.join(cell.folder, "config.json")):
        build.remove_tokenizer(cell.folder)  # Of a start that was killed before the run began.
    arguments = [*command, f"--config={resolved.__file__}:{write_config(cell)}"]
    environment = {"GLIBC_TUNABLES": HUGE_PAGES, **os.environ}  # Else it would start twice.
    with open(log_path(cell), "ab") as log, bind_to_cores(cores):
        # A group of its own: Ctrl-C is for this process, which passes it on as SIGTERM.
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            process_group=0,
            pass_fds=own.descriptors,
        )
    return Running(cell, process, cores, own)


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
    """Return the file that tells the other commands of a grid why a run failed."""
    return f"{folder}.failed"


def failure_since(folder: str, since: float) -> str:
    """Return why the run of a folder failed, if a command has said so since then, in seconds since 1970; else ""."""
    path = failure_path(folder)
    try:
        return files.read_bytes(path).decode() if os.path.getmtime(path) >= since else ""
    except FileNotFoundError:
        return ""


def log_path(cell: Cell) -> str:
    """Return the log of a run; it lies beside the folder, which must be empty when the run begins."""
    return f"{cell.folder}.log"


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


def make_show(console: Console) -> Callable[..., None]:
    """Return `show(event, running, waiting)`, which prints an event, and each minute what runs, here or elsewhere."""
    last = time.monotonic()

    def show(event: str, running: Sequence[Running], waiting: Sequence[Cell] = ()) -> None:
        nonlocal last
        lines = [event] if event else []
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            lines += [f"{job.cell.title}: {status(job.cell)}" for job in running]
            if not running:
                lines += [f"waits for {cell.title}: {owner_of(cell.folder)}" for cell in waiting]
        for line in lines:
            console.print(Text(line), soft_wrap=True)

    return show
