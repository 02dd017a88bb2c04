"""An evaluation from its set-up to its results."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import ml_collections
from absl import logging
from rich.console import Console

from agentr1_jax.policy.decoder import Params
from agentr1_jax.report.evaluation import quality_table
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.runtime.compile_cache import CompileCounter
from agentr1_jax.runtime.monitoring import progress_bar
from agentr1_jax.runtime.processes import StopRequest
from agentr1_jax.trajectory_io import write_jsonl
from experiments import build
from experiments.evaluation import modes, results
from experiments.evaluation.chunks import Chunk, Stopped, chunks_of, claim, roll_out
from experiments.evaluation.setting import Request, Setting, load, request_record, resolve_sources, set_up


def evaluate(given: ml_collections.ConfigDict | None, source: str, request: Request, console: Console) -> int:
    """Set-up, chunks of questions, results.

    Args:
      given: the config of `--config`; None without one.
      source: of `--checkpoint`; "" without one.
      request: what is asked.
      console: where the figures are shown.

    Returns:
      number of programs that were compiled after the first chunk; there should be none.

    Raises:
      UserError: something given does not fit, or the folder holds another evaluation.
    """
    config, sources, out = resolve_sources(given, source, request)
    answerable = [mode for mode in request.modes if modes.parameters_of(mode, request.baselines) in sources]
    setting = set_up(config, request, answerable)
    chunks = {mode: chunks_of(out, mode, setting.counts, request.chunk) for mode in setting.agents}
    record = request_record(setting, request)
    compiles, recompiles, warm = CompileCounter(), 0, False
    with StopRequest() as stop, progress_display(chunks) as advance:
        for role, origin in sources.items():
            params, digest = load(setting, origin)
            own = [mode for mode in setting.agents if modes.parameters_of(mode, request.baselines) == role]
            names = {"policies": dict.fromkeys(own, digest), "sources": dict.fromkeys(own, origin.name)}
            record = claim(out, {**record, **names})
            for chunk in (chunk for mode in own for chunk in chunks[mode] if not chunk.done):
                before = compiles.count
                try:
                    answer(chunk, setting, params, request, stop, functools.partial(advance, chunk))
                except Stopped:
                    console.print(f"stopped; the same command goes on with {out}", markup=False)
                    return recompiles
                compiled, warm = (compiles.count - before) * warm, True
                recompiles += compiled
                if compiled:
                    logging.warning("%d programs were compiled after warm-up", compiled)
    evaluation = results.write(out, setting, record)
    console.print(quality_table(evaluation, title=out))
    look = f"Look at {out}/evaluation.md and {out}/report.html; all figures are in {out}/evaluation.json"
    console.print(look, markup=False, highlight=False)
    return recompiles


def answer(
    chunk: Chunk, setting: Setting, params: Params, request: Request, stop: StopRequest, advance: Callable[[], None]
) -> None:
    """Answer the questions of a chunk, and writes its file; calls `advance` with each of them.

    Raises:
      Stopped: on request, between two questions; no file is written then.
    """
    trajectories = roll_out(
        chunk,
        setting.engine,
        params,
        setting.agents[chunk.mode],
        setting.task,
        samples=request.samples,
        sampling=SamplingConfig(request.temperature),
        limits=build.limits(setting.config),
        seed=request.seed,
        stop=stop,
        advance=advance,
    )
    write_jsonl(chunk.path, trajectories)


@contextlib.contextmanager
def progress_display(chunks: Mapping[str, Sequence[Chunk]]) -> Iterator[Callable[[Chunk], None]]:
    """Progress in questions: gives a function to call, as each is answered, with the chunk that it is of."""
    every = [chunk for of_mode in chunks.values() for chunk in of_mode]
    done = sum(len(chunk.rows) for chunk in every if chunk.done)
    with progress_bar("evaluate", done, sum(len(chunk.rows) for chunk in every), True) as show:

        def advance(chunk: Chunk) -> None:
            nonlocal done
            done += 1
            show(done, f"questions; {chunk.mode} on {chunk.split}")

        yield advance
