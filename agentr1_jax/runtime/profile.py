"""A `jax.profiler` trace of some RL batches."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator

import jax
from absl import logging

from agentr1_jax import files
from agentr1_jax.errors import UserError


def parse_updates(text: str) -> range:
    """The RL batches a to b-1 of `"a:b"`; none of `""`.

    Raises:
      UserError: it is neither.
    """
    found = re.fullmatch(r"([0-9]{1,15}):([0-9]{1,15})", text)
    updates = range(int(found[1]), int(found[2])) if found else range(0)
    if text and not updates:
        raise UserError(
            f'profile_updates is {text!r}; it must be "a:b" with whole numbers 0 <= a < b, to trace RL batches a to '
            'b-1 counted from 0, or "" for no trace'
        )
    return updates


@contextlib.contextmanager
def profiled(run_dir: str | os.PathLike[str], updates: range, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Gives a function `begin(update)`, to be called before every RL batch; writes a trace to `run_dir/profile`.

    The trace begins before the first batch in `updates` and ends before the first one after them, or when this context
    is left, whatever the reason. Each batch is a step named `rl` in it. Python functions are not traced one by one:
    they would fill the trace's buffers long before the batch is over.

    Args:
      run_dir: the run's folder.
      updates: batches to trace, consecutive; may be empty.
      enabled: False in all processes but one.
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
                written = trace.enter_context(files.written_locally(folder))
                trace.enter_context(jax.profiler.trace(written, profiler_options=options))
                trace.callback(logging.info, "tracing RL batches from %d on into %s", update, folder)
            if wanted:
                step.enter_context(jax.profiler.StepTraceAnnotation("rl", step_num=update))
            tracing = wanted

        yield begin
