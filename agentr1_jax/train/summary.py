"""What a finished run leaves for its reader: summary, learning curve and report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from agentr1_jax import files
from agentr1_jax.runtime.metrics import read_metrics
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.train.parts import Setup
from agentr1_jax.train.progress import Progress

SHOWN_PER_FILE = 24


def draw_timeline(setup: Setup) -> None:
    """Draw the slots of the engine in its last rollout, where a timeline was recorded."""
    if setup.engine.timeline is not None:
        from agentr1_jax import report  # Here, because matplotlib is slow to import.

        path = RunFolder(setup.settings.run.run_dir).file("timeline.png")
        slots = setup.settings.engine.slots
        report.plot_timeline(path, setup.engine.timeline.records(), slots=slots, title="last RL batch")


def write_summary(setup: Setup, progress: Progress, config: Mapping[str, Any]) -> None:
    """Write summary, learning curve and report; print a short table and where to look.

    Args:
      setup: parts of the run.
      progress: of the finished run.
      config: resolved config, as plain JSON.
    """
    from agentr1_jax import report

    settings, totals = setup.settings, progress.totals
    folder = RunFolder(settings.run.run_dir)

    def rate(tokens: str, seconds: str) -> float:
        return round(totals.get(f"time/{tokens}", 0) / max(totals.get(f"time/{seconds}", 0), 1e-9), 1)

    summary = {
        **progress.results,
        "questions": settings.eval.questions,
        "seconds": round(progress.seconds, 1),
        "warm_start_seconds": round(progress.warm_start_seconds, 1),
        "updates": 0 if settings.warm_start.control_seconds else settings.run.updates,
        "decode_tokens_per_s": rate("decode_tokens", "rollout"),
        "learner_tokens_per_s": rate("learner_tokens", "learn"),
        "recompiles_after_warmup": int(totals.get("recompiles", 0)),
    }
    with files.atomic_write(folder.file("summary.json")) as out:
        json.dump(summary, out, indent=2)
        out.write("\n")
    curve, timeline = folder.file("learning_curve.png"), folder.file("timeline.png")
    report.plot_learning_curve(curve, read_metrics(folder.file("metrics.jsonl")), title=folder.path)
    trajectories = folder.sample_trajectories(SHOWN_PER_FILE)
    report.write_report(
        folder.file("report.html"),
        trajectories,
        decode=setup.tokenizer.decode,
        title=folder.path,
        head=report.PageHead(
            summary, curve_png=curve, timeline_png=timeline if files.exists(timeline) else None, config=config
        ),
        template_ids=setup.tokenizer.added.values(),
    )
    console = Console()
    console.print(report.summary_table(summary, title=folder.path))
    console.print(f"Look at {folder.path}/report.html and {curve}; figures are in {folder.path}/summary.json")
