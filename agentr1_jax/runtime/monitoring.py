"""What a user watches while a run goes on: a progress bar and a `jax.profiler` trace of some RL batches."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator

import jax
from absl import logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentr1_jax import files
from agentr1_jax.errors import UserError

SECONDS_BETWEEN_LINES = 10.0
"""Least time between two log lines of a progress bar that is not on a terminal."""


@contextlib.contextmanager
def progress_bar(title: str, done: int, total: int, enabled: bool) -> Iterator[Callable[[int, str], None]]:
    """Show a bar with rate and time left on a terminal, or else a log line now and then.

    Args:
      title: name of the phase.
      done: number of updates that are done at the start (of a resumed run).
      total: number of updates of the phase.
      enabled: False in all processes but one.

    Yields:
      a function `show(done, text)`.
    """
    console = Console(stderr=True)
    if not enabled or not console.is_terminal:
        start, last = time.monotonic(), -SECONDS_BETWEEN_LINES

        def log_line(now: int, text: str) -> None:
            nonlocal last
            seconds = time.monotonic()
            if enabled and (now == total or seconds - last > SECONDS_BETWEEN_LINES):
                last = seconds
                left = (total - now) * (seconds - start) / max(now - done, 1)
                logging.info("%s %d/%d, %.0f s left  %s", title, now, total, max(left, 0), text)

        yield log_line
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


def parse_profile_updates(text: str) -> range:
    """Parse `"a:b"` into the RL batches a to b-1; `""` means none. Raises UserError if the text is neither."""
    match = re.fullmatch(r"([0-9]{1,15}):([0-9]{1,15})", text)
    updates = range(int(match[1]), int(match[2])) if match else range(0)
    if text and not updates:
        raise UserError(
            f'profile_updates is {text!r}; it must be "a:b" with whole numbers 0 <= a < b, to trace RL batches a to '
            'b-1 counted from 0, or "" for no trace'
        )
    return updates


@contextlib.contextmanager
def trace_updates(run_dir: str | os.PathLike[str], updates: range, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Write a profiler trace of some RL batches to `run_dir/profile`.

    The trace begins before the first batch in `updates` and ends before the first batch after them, or when this
    context is left for any reason. Each batch is a step named `rl` in it. Python functions are not traced: they would
    fill the trace's buffers long before the batch is over.

    Args:
      run_dir: the run folder.
      updates: consecutive batches to trace; may be empty.
      enabled: False in all processes but one.

    Yields:
      a function `begin(update)`, to be called before every RL batch.
    """
    folder = os.path.join(run_dir, "profile")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    tracing = False
    with contextlib.ExitStack() as trace, contextlib.ExitStack() as step:

        def begin(update: int) -> None:
            nonlocal tracing
            step.close()
            wanted = enabled and update in updates
            if tracing and not wanted:
                trace.close()
            if wanted and not tracing:
                local = trace.enter_context(files.local_folder(folder))
                trace.enter_context(jax.profiler.trace(local, profiler_options=options))
                trace.callback(logging.info, "tracing RL batches from %d on into %s", update, folder)
            if wanted:
                step.enter_context(jax.profiler.StepTraceAnnotation("rl", step_num=update))
            tracing = wanted

        yield begin
