"""Progress of a phase: a bar with rate and time left on a terminal, else a log line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from absl import logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def progress(title: str, done: int, total: int, enabled: bool) -> Iterator[Callable[[int, str], None]]:
    """Gives a function `show(done, text)`.

    Args:
      title: name of the phase.
      done: how far the phase is at the start (a resumed run).
      total: how far it goes.
      enabled: False in all processes but one.
    """
    console = Console(stderr=True)
    if not enabled or not console.is_terminal:
        started, last = time.monotonic(), -SECONDS_BETWEEN_LINES

        def line(now: int, text: str) -> None:
            nonlocal last
            time_now = time.monotonic()
            if enabled and (now == total or time_now - last > SECONDS_BETWEEN_LINES):
                last = time_now
                left = (total - now) * (time_now - started) / max(now - done, 1)
                logging.info("%s %d/%d, %.0f s left  %s", title, now, total, max(left, 0), text)

        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total, completed=done, text="")
        yield lambda now, text: bar.update(task, completed=now, text=text)
