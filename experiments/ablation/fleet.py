"""Runs of a grid as processes of their own: a share of the cores each, started in order, watched, stopped together."""

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

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from agentr1_jax.runtime.processes import HUGE_PAGES, StopRequest
from configs import resolved
from experiments import build
from experiments.ablation.grid import Cell, is_finished, write_config

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_BETWEEN_LINES = 60.0
TAIL_BYTES = 1 << 17
"""Of metrics.jsonl, read for the progress of a run."""
LOG_LINES = 12
"""Of a failed run's log, shown with the failure."""


@dataclasses.dataclass(frozen=True)
class Running:
    """A run under way, and the cores it has."""

    cell: Cell
    process: subprocess.Popen[bytes]
    cores: frozenset[int]


def run_all(
    cells: Sequence[Cell], *, parallel: int, stop: StopRequest, console: Console, program: Sequence[str] = ()
) -> dict[Cell, str]:
    """Runs all that are not finished, in order, so many at once; a run waits for the one it starts from.

    Once a stop is requested nothing more is started, and what runs is told to save and leave, and waited for.

    Args:
      cells: the runs.
      parallel: processes at once.
      stop: entered by the caller.
      console: where progress is shown.
      program: what is run in place of `python -m experiments.train`.

    Returns:
      the runs that failed, each with the end of its log or why it was not started.
    """
    command = program or (sys.executable, "-m", "experiments.train")
    waiting, running, failed = [cell for cell in cells if not cell.finished], list[Running](), dict[Cell, str]()
    free, told = core_shares(parallel), False
    with shown(console) as show:
        try:
            while running or (waiting and not stop.requested):
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    free.append(job.cores)
                    if fault := fault_of(job, stop.requested):
                        failed[job.cell] = fault
                    show(f"{title(job.cell)}: {'failed' if fault else status(job.cell)}", running)
                ready = [cell for cell in waiting if not cell.after or is_finished(cell.after)]
                for cell in ready[: 0 if stop.requested else len(free)]:
                    running.append(start(cell, free.pop(0), command))
                    waiting.remove(cell)
                    show(f"{title(cell)}: starts in {cell.folder}", running)
                hopeless = [cell for cell in waiting if cell.after in {broken.folder for broken in failed}]
                failed |= dict.fromkeys(hopeless, "not started, since its warm start failed")
                waiting = [cell for cell in waiting if cell not in hopeless]
                if stop.requested and not told:
                    told = True
                    show("stopping; what runs saves and leaves", running)
                    for job in running:
                        job.process.terminate()
                show("", running)
                time.sleep(SECONDS_BETWEEN_LOOKS if running else 0)
        finally:
            for job in running:  # Left over only where something broke, or a second Ctrl-C came.
                job.process.kill()
                job.process.wait()
    return failed


def core_shares(parallel: int) -> list[frozenset[int]]:
    """The cores of each of so many processes: equal shares, or one core of several processes where there are too few.

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
    """Starts or resumes a run; what it says is added to the log beside its folder."""
    if not os.path.exists(os.path.join(cell.folder, "config.json")):
        build.discard_tokenizer(cell.config)  # Of a start that was killed before the run began.
    arguments = [*command, f"--config={resolved.__file__}:{write_config(cell)}"]
    environment = {"GLIBC_TUNABLES": HUGE_PAGES, **os.environ}  # Else it would start twice.
    with open(log_path(cell), "ab") as log, bound_to(cores):
        # A group of its own: Ctrl-C is for this process, which passes it on as SIGTERM.
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, process_group=0
        )
    return Running(cell, process, cores)


@contextlib.contextmanager
def bound_to(cores: frozenset[int]) -> Iterator[None]:
    """Binds this thread, and with it what it starts, to some cores; does nothing for none."""
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
    """What went wrong with a run that has ended; "" for nothing."""
    code = job.process.returncode
    if (job.cell.finished and code == 0) or (stopping and code in (0, -signal.SIGTERM)):
        return ""
    ended = f"exit status {code}" if code >= 0 else f"ended by signal {-code}"
    with open(log_path(job.cell), encoding="utf-8", errors="replace") as lines:
        last = "".join(lines.readlines()[-LOG_LINES:]).rstrip()
    return f"{ended} without a summary; {log_path(job.cell)} ends with\n{last}"


def log_path(cell: Cell) -> str:
    """The log of a run: beside its folder, which has to be empty when it begins."""
    return f"{cell.folder}.log"


def title(cell: Cell) -> str:
    """Arm and seed."""
    return f"{cell.arm} seed {cell.seed}"


def status(cell: Cell) -> str:
    """Where a run stands: phase, update, last score, from the end of its metrics."""
    phase, update, em = "set-up", 0, None
    for record in reversed(last_records(cell.folder)):
        for key in ("eval/em", "rollout/em"):
            em = record.get(key, em) if em is None else em
        if phase == "set-up" and record.get("phase") in ("warm_start", "rl"):
            phase, update = record["phase"], record["update"]
    if cell.finished:
        phase = "finished"
    total = {"warm_start": cell.config.warm_start_updates, "rl": cell.config.updates}.get(phase)
    where = phase.replace("_", " ") + (f" {update}/{total}" if total else "")
    return where if em is None else f"{where}  em {float(em):.3f}"


def last_records(folder: str) -> list[dict[str, Any]]:
    """The last records of a metrics file that is being written; [] where there is none."""
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


@contextlib.contextmanager
def shown(console: Console) -> Iterator[Callable[[str, Sequence[Running]], None]]:
    """Gives a function `show(event, running)`: live, a line a run, on a terminal; else plain lines now and then."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:

            def redraw(event: str, running: Sequence[Running]) -> None:
                if event:
                    console.print(Text(event))
                live.update(Group(*(Text(f"{title(j.cell)}: {status(j.cell)}") for j in running)), refresh=True)

            yield redraw
        return
    last = time.monotonic()

    def tell(event: str, running: Sequence[Running]) -> None:
        nonlocal last
        if event:
            console.print(Text(event), soft_wrap=True)
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            for job in running:
                console.print(Text(f"{title(job.cell)}: {status(job.cell)}"), soft_wrap=True)

    yield tell
