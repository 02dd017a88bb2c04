"""Small runs of the training script, in processes of their own."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
from pathlib import Path

from agentr1_jax.runtime.metrics import read_metrics
from agentr1_jax.train.metrics import METRICS
from configs import quickstart

ROOT = Path(__file__).parents[1]
UNOPTIMISED = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
"""For the environment of processes that compile for most of their time, in tests of anything but what is compiled."""
SMALL = {
    "policy.width": 32,
    "policy.layers": 1,
    "policy.hidden": 64,
    "policy.head_dim": 8,
    "learner.packing": "trajectory",
    "warm_start.updates": 4,
    "warm_start.demonstrations": 64,
    "warm_start.batch": 16,
    "updates": 2,
    "rollout.groups": 4,
    "rollout.samples": 2,
    "rollout.slots": 8,
    "eval.questions": 8,
    "eval.quick_questions": 4,
    "eval.every": 1,
    "tokenizer.texts": 400,
}


def command(config: str, run_dir: Path, **overrides: object) -> list[str]:
    """Flags of a small run; `__` stands for the dots of a key."""
    keys = {**SMALL, "run_dir": run_dir, **{k.replace("__", "."): v for k, v in overrides.items()}}
    return [f"--config=configs/{config}.py", *(f"--config.{k}={v}" for k, v in keys.items())]


def train(config: str, run_dir: Path, optimised: bool = True, **overrides: object) -> subprocess.CompletedProcess[str]:
    """Train to the end; `optimised` programs take longer to compile, and run faster."""
    arguments = [sys.executable, "-m", "experiments.train", *command(config, run_dir, **overrides)]
    environment = os.environ | ({} if optimised else UNOPTIMISED)
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=500, env=environment)


def small_config(run_dir: Path, **overrides: object):
    """The config of a small run of the quickstart."""
    with quickstart.get_config().unlocked() as config:
        keys = {**SMALL, "learner.rows": 8, "run_dir": str(run_dir)}
        config.update_from_flattened_dict(keys | {k.replace("__", "."): v for k, v in overrides.items()})
    return config.lock()


def check_metric_names(*folders: Path, everything: bool = False) -> None:
    """Hold the table of metrics against what runs wrote: all that they wrote is listed.

    With `everything` they also wrote all that is listed without a condition.
    """
    names = {name for folder in folders for record in read_metrics(folder / "metrics.jsonl") for name in record}
    unlisted = [name for name in names if not any(fnmatch.fnmatchcase(name, listed) for listed in METRICS)]
    assert not unlisted, f"list them in agentr1_jax/train/metrics.py: {sorted(unlisted)}"
    if everything:
        always = [name for name, metric in METRICS.items() if not metric.condition]
        unwritten = [name for name in always if not fnmatch.filter(names, name)]
        assert not unwritten, f"no run wrote them: {unwritten}"
