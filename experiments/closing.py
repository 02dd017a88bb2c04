"""What a run leaves for its reader: the picture of its slots, summary, learning curve and report."""

from __future__ import annotations

import json
import os

import numpy as np
from rich.console import Console

from agentr1_jax import files, report
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.metrics import read_metrics
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.trajectory import Trajectory
from experiments.circle import Run
from experiments.journal import Position

SHOWN_PER_FILE = 24


def draw_timeline(run: Run) -> None:
    """Leaves a picture of the slots in the last rollout, where one was recorded."""
    if run.engine.timeline is None:
        return
    run.engine.record_timeline = False
    slots = run.config.rollout.slots
    report.plot_timeline(timeline_path(run), run.engine.timeline.records(), slots=slots, title="last RL batch")


def timeline_path(run: Run) -> str:
    return os.path.join(run.config.run_dir, "timeline.png")


def finish(run: Run, position: Position) -> None:
    """Writes summary, learning curve and report; prints a short table and where to look."""
    config, totals = run.config, position.totals
    summary = {
        **position.results,
        "questions": config.eval.questions,
        "seconds": round(position.seconds, 1),
        "warm_start_seconds": round(position.warm_start_seconds, 1),
        "updates": 0 if config.control else config.updates,
        "decode_tokens_per_s": round(totals.get("time/decode_tokens", 0) / max(totals.get("time/rollout", 0), 1e-9), 1),
        "learner_tokens_per_s": round(totals.get("time/learner_tokens", 0) / max(totals.get("time/learn", 0), 1e-9), 1),
        "recompiles_after_warmup": int(totals.get("recompiles", 0)),
    }
    folder = config.run_dir
    with files.atomic_write(os.path.join(folder, "summary.json")) as out:
        json.dump(summary, out, indent=2)
        out.write("\n")
    curve = os.path.join(folder, "learning_curve.png")
    report.plot_learning_curve(curve, read_metrics(os.path.join(folder, "metrics.jsonl")), title=folder)
    shown = RunFolder(folder).sample_trajectories(SHOWN_PER_FILE)
    report.write_report(
        os.path.join(folder, "report.html"),
        shown,
        decode=run.tokenizer.decode,
        title=folder,
        summary=summary,
        curve_png=curve,
        timeline_png=timeline_path(run) if files.exists(timeline_path(run)) else None,
        advantages={t.uid: step_advantages(t) for t in shown if has_advantages(t)},
        config=configs.resolve(config),
        template_ids=run.tokenizer.added.values(),
    )
    console = Console()
    console.print(report.summary_table(summary, title=folder))
    console.print(f"Look at {folder}/report.html and {folder}/learning_curve.png; figures are in {folder}/summary.json")


def has_advantages(trajectory: Trajectory) -> bool:
    """Return whether training assigned advantages to a trajectory."""
    return bool(trajectory.steps) and all(step.advantages is not None for step in trajectory.steps)


def step_advantages(trajectory: Trajectory) -> list[np.ndarray]:
    """Return the advantages that training assigned, float32 [R] for each step."""
    return [np.zeros(0, np.float32) if s.advantages is None else s.advantages for s in trajectory.steps]
