"""Figures of a run: means over trajectories, and what a finished run leaves for its reader."""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Iterator, Sequence

from absl import logging
from rich.console import Console

from agentr1_jax import files
from agentr1_jax.envs.rewards import totals
from agentr1_jax.runtime import processes
from agentr1_jax.runtime.metrics import read_metrics
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.train.build import Setup
from agentr1_jax.train.progress import Progress
from agentr1_jax.trajectory import POLICIES, Trajectory


def trajectory_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return means over the trajectories of all processes. Collective.

    They are of metrics, reward and its parts, steps, tokens and outcomes; `em` is also given for each kind of question
    and each task of a mixture. A metric is averaged over the trajectories that have it, an outcome over all.
    """
    own: dict[str, list[float]] = collections.defaultdict(list)
    for t in trajectories:
        for key, value in _figures(t):
            own[key].append(float(value))
    values: dict[str, list[float]] = collections.defaultdict(list)
    for of_process in processes.all_gather_json(own):
        for key, part in of_process.items():
            values[key] += part
    return {
        key: sum(of_key) / len(values["steps"] if key.startswith("outcome/") else of_key)
        for key, of_key in sorted(values.items())
    }


def _figures(t: Trajectory) -> Iterator[tuple[str, float]]:
    """Yield the names and values that a trajectory adds to the means."""
    yield from t.metrics.items()
    if "em" in t.metrics:
        for kind in (t.row.get("kind"), t.row.get("task")):
            if kind is not None:
                yield f"em_{kind}", t.metrics["em"]
    counts = POLICIES[t.outcome].reward
    if counts != "none":
        yield "reward", t.total_reward
    if counts == "use":
        for part, value in totals(step.raw_reward_parts for step in t.steps).items():
            yield f"reward/{part}", value
    yield "steps", len(t.steps)
    yield "response_tokens", sum(len(s.response_ids) for s in t.steps)
    yield f"outcome/{t.outcome}", 1.0


def draw_timeline(setup: Setup) -> None:
    """Draw the slots of the engine in its last rollout, where a timeline was recorded."""
    if setup.engine.timeline is not None:
        from agentr1_jax import report  # Here, because matplotlib is slow to import.

        path = RunFolder(setup.settings.run.run_dir).file("timeline.png")
        slots = setup.settings.engine.slots
        report.plot_timeline(path, setup.engine.timeline.spans, slots=slots, title="last RL batch")


def write_report(setup: Setup) -> None:
    """Write report.html from what the run has recorded so far, in process 0.

    A report that cannot be written is a warning: it must not end a run.
    """
    if processes.process_index():
        return
    started, folder = time.perf_counter(), RunFolder(setup.settings.run.run_dir)
    try:
        from agentr1_jax.report.run_report import Tokens, write_run_report
        from agentr1_jax.report.selection import Selection

        tokens = Tokens(setup.tokenizer.decode, frozenset(setup.tokenizer.added.values()))
        for fault in write_run_report(folder, Selection(), tokens):
            logging.warning("report: %s", fault)
    except Exception as error:
        logging.warning("%s is not written (%s: %s)", folder.file("report.html"), type(error).__name__, error)
    else:
        logging.info("%s: written in %.1f s", folder.file("report.html"), time.perf_counter() - started)


def write_summary(setup: Setup, progress: Progress) -> None:
    """Write summary, learning curve and report of a finished run; print a short table and where to look."""
    from agentr1_jax import report

    settings, sums = setup.settings, progress.totals
    folder = RunFolder(settings.run.run_dir)

    def rate(tokens: str, seconds: str) -> float:
        return round(sums.get(f"time/{tokens}", 0) / max(sums.get(f"time/{seconds}", 0), 1e-9), 1)

    modes = sorted(progress.results, key=lambda name: name.rpartition("_")[2])  # Before and after of one mode together.
    learned = {"warm_start_seconds": round(progress.warm_start_seconds, 1)} if progress.warm_start_seconds else {}
    summary = {
        **{name: progress.results[name] for name in modes},
        "questions": settings.eval.questions,
        "seconds": round(progress.seconds, 1),
        **learned,
        "updates": 0 if settings.warm_start.control_seconds else settings.run.updates,
        "decode_tokens_per_s": rate("decode_tokens", "rollout"),
        "learner_tokens_per_s": rate("learner_tokens", "learn"),
        "recompiles_after_warmup": int(sums.get("recompiles", 0)),
    }
    with files.atomic_write(folder.file("summary.json")) as out:
        json.dump(summary, out, indent=2)
        out.write("\n")
    curve = folder.file("learning_curve.png")
    report.plot_learning_curve(curve, read_metrics(folder.file("metrics.jsonl")), title=folder.path)
    write_report(setup)
    console = Console()
    console.print(report.summary_table(summary, title=folder.path))
    look = f"Look at {folder.path}/report.html and {curve}; figures are in {folder.path}/summary.json"
    console.print(look, markup=False, highlight=False, soft_wrap=True)
