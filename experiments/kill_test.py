"""Kill a small run at random moments, start it again each time, and compare it with an undisturbed run.

    python -m experiments.kill_test [--kills=20] [--out=FOLDER] [train:--config=FILE train:--config.key=value ...]

SIGKILL goes to the whole process group, in turn while the run rolls out, updates, is about to evaluate, writes a
checkpoint, writes trajectories, and at any moment; SIGTERM in between does not count. A run that ends before its next
kill is followed by another run. Arguments that begin with `train:` are added to those of the small config; a config
file among them replaces the small config. Each run is compared with an undisturbed one:

- synchronous rollouts (`rollout.staleness=0`): parameters, metrics without `time/`, and trajectories are bit-equal. For
  a batch of which an earlier start had finished some groups before SIGTERM, the work of engine and tools is left out;
- rollouts ahead of the learner: every group of every batch is there once, whole and no older than allowed, and no
  pending group beside a checkpoint was sampled again.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import glob
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from rich.console import Console

from agentr1_jax.errors import UserError
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.metrics import read_metrics
from agentr1_jax.runtime.run_folder import RunFolder, read_trajectories
from agentr1_jax.trajectory import Trajectory

KILLS = flags.DEFINE_integer("kills", 20, "number of kills by SIGKILL", lower_bound=0)
OUT = flags.DEFINE_string("out", "runs/kill_test", "folder for the runs; it must not exist")
SEED = flags.DEFINE_integer("seed", 0, "seed of the moments")

PREFIX = "train:"
SMALL = {
    "policy.width": 32,
    "policy.layers": 1,
    "policy.hidden": 64,
    "policy.head_dim": 8,
    "tokenizer.texts": 400,
    "warm_start.updates": 4,
    "warm_start.demonstrations": 64,
    "warm_start.batch": 16,
    "updates": 8,
    "rollout.groups": 4,
    "rollout.samples": 2,
    "rollout.slots": 8,
    "rollout.deterministic": True,
    "eval.questions": 8,
    "eval.every": 3,
    "eval.quick_questions": 4,
    "checkpoint.every": 1,
}
"""Keys of the small config that differ from configs/quickstart.py."""
WORK = ("rollout/copied_tokens", "rollout/occupancy", "rollout/prefill_", "tools/")
"""Prefixes of the metrics that count the work of engine and tools for a batch."""
BEFORE_EVALUATIONS = "trajectories/rl_*[258].jsonl.gz"
"""Last files before the evaluations of the small config: batches are counted from 0, and `eval.every` is 3."""
MOST_RUNS_PER_KILL = 3
POLL_SECONDS = 0.001
OUTPUT_CHARACTERS = 3000
"""Number of characters of a failed run's output in the message."""


class Times(NamedTuple):
    """Durations in an undisturbed run, in seconds: of the whole run, of a rollout, of an update."""

    all: float
    rollout: float
    learn: float


class Aim(NamedTuple):
    """Moment to kill a run at: some seconds after new files of a pattern appear; "" is the start of the run."""

    pattern: str
    delay: Callable[[Times, np.random.Generator], float]
    signal: signal.Signals = signal.SIGKILL


def in_rollout(times: Times, rng: np.random.Generator) -> float:
    """Return a delay after a batch's trajectories: into the next rollout, or the evaluation before it."""
    return times.learn + rng.uniform(0, times.rollout)


AIMS = {
    "rolling out": Aim("trajectories/rl_*.gz", in_rollout),
    "updating": Aim("trajectories/rl_*.gz", lambda times, rng: rng.uniform(0, times.learn)),
    "about an evaluation": Aim(BEFORE_EVALUATIONS, in_rollout),
    "writing a checkpoint": Aim("checkpoints/*tmp*", lambda _, rng: rng.uniform(0, 0.02)),
    "writing trajectories": Aim("trajectories/rl_*", lambda _, rng: 0.0),  # The .partial file, if it is seen in time.
    "any moment": Aim("", lambda times, rng: rng.uniform(0, times.all)),
    "asked to stop": Aim("trajectories/rl_*.gz", in_rollout, signal.SIGTERM),
    "asked to stop about an evaluation": Aim(BEFORE_EVALUATIONS, in_rollout, signal.SIGTERM),
}


def main(argv: Sequence[str]) -> None:
    """Run two undisturbed runs, then others that are killed until there are enough kills."""
    out, rng, console = Path(OUT.value), np.random.default_rng(SEED.value), Console(soft_wrap=True)
    if out.exists():
        raise UserError(f"{out} exists; remove it or choose another --out")
    command = [sys.executable, "-m", "experiments.train", *arguments(argv[1:])]

    first, straight = out / "first", out / "straight"
    run_reference(command, first)
    times = run_reference(command, straight)  # This run loads its programs, as the killed ones do.
    console.print(f"undisturbed: {times.all:.0f} s; a rollout {times.rollout:.2f} s, an update {times.learn:.2f} s")
    kills, tries = collections.Counter[str](), collections.Counter[str]()  # A run may end before the moment.
    faults = faults_of(first, straight, [])
    for number in range(MOST_RUNS_PER_KILL * KILLS.value):
        if by_sigkill(kills) == KILLS.value:
            break
        run = out / f"killed_{number}"
        finished = run_with_kills(command, run, times, rng, kills, tries)
        found = faults_of(run, straight, finished)
        told = found or "equal to the undisturbed run"
        console.print(f"{run}: {kills.total()} kills so far; {told}", markup=False)
        faults += found
    console.print(f"kills: {dict(kills)}")
    if faults or by_sigkill(kills) < KILLS.value:
        raise UserError(f"{len(faults)} faults, {by_sigkill(kills)} of {KILLS.value} kills; the runs are kept in {out}")


def by_sigkill(kills: collections.Counter[str]) -> int:
    """Count the kills by SIGKILL."""
    return sum(count for name, count in kills.items() if AIMS[name].signal == signal.SIGKILL)


def arguments(argv: Sequence[str]) -> list[str]:
    """Return the arguments of experiments.train. Raise UserError if one lacks the prefix."""
    if strangers := [argument for argument in argv if not argument.startswith(f"{PREFIX}--")]:
        raise UserError(f"unexpected argument {strangers[0]!r}; flags of experiments.train are written {PREFIX}--...")
    own = [argument.removeprefix(PREFIX) for argument in argv]
    if any(argument.startswith("--config=") for argument in own):
        return own
    return ["--config=configs/quickstart.py", *(f"--config.{key}={value}" for key, value in SMALL.items()), *own]


def start(command: Sequence[str], run: Path) -> subprocess.Popen[str]:
    """Start a run; its output goes to a file beside the run folder."""
    run.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{run}.log", "a", encoding="utf-8") as log:
        flag = f"--config.run_dir={run}"
        return subprocess.Popen([*command, flag], stdout=log, stderr=log, text=True, start_new_session=True)


def check_end(child: subprocess.Popen[str], run: Path) -> None:
    """Wait for the end of a run. Raise UserError if its status is not 0."""
    if status := child.wait():
        raise UserError(
            f"{run}: a start ended with status {status}:\n{Path(f'{run}.log').read_text()[-OUTPUT_CHARACTERS:]}"
        )


def run_reference(command: Sequence[str], run: Path) -> Times:
    """Run from start to end, and return the durations."""
    begin = time.perf_counter()
    check_end(start(command, run), run)
    seconds = time.perf_counter() - begin
    records = [record for record in read_metrics(run / "metrics.jsonl") if record["phase"] == "rl"]
    return Times(seconds, *(float(np.median([r[f"time/{name}"] for r in records])) for name in ("rollout", "learn")))


def run_with_kills(
    command: Sequence[str],
    run: Path,
    times: Times,
    rng: np.random.Generator,
    kills: collections.Counter[str],
    tries: collections.Counter[str],
) -> list[Trajectory]:
    """Start a run again and again until its end, and kill it in between while there are kills left.

    Returns:
      the pending rollouts beside the checkpoints from which it resumed.
    """
    finished: list[Trajectory] = []
    while by_sigkill(kills) < KILLS.value:
        name = min(AIMS, key=lambda aim: tries[aim])
        tries[name] += 1
        if not start_and_kill(command, run, AIMS[name], times, rng):
            return finished
        kills[name] += 1
        finished += RunFolder(str(run)).read_pending(newest_checkpoint(run))
    check_end(start(command, run), run)
    return finished


def start_and_kill(command: Sequence[str], run: Path, aim: Aim, times: Times, rng: np.random.Generator) -> bool:
    """Start a run and kill it at a moment; returns False if it ended before."""
    known, wanted = match_files(run, aim.pattern), int(rng.integers(1, 4))
    child = start(command, run)
    while aim.pattern and wanted:
        if child.poll() is not None:
            check_end(child, run)
            return False
        new = match_files(run, aim.pattern) - known
        wanted -= min(len(new), wanted)
        known |= new
        time.sleep(POLL_SECONDS)
    try:
        child.wait(timeout=aim.delay(times, rng))
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, aim.signal)
        if child.wait() != -signal.SIGKILL:
            check_end(child, run)
        return True
    check_end(child, run)
    return False


def match_files(run: Path, pattern: str) -> set[tuple[str, int]]:
    """Return the matching files: names with inodes, which differ if a file was replaced."""
    found = set()
    for path in glob.glob(os.path.join(run, pattern)):
        with contextlib.suppress(FileNotFoundError):  # Renamed meanwhile.
            found.add((os.path.basename(path), os.stat(path).st_ino))
    return found


def newest_checkpoint(run: Path) -> int:
    """Return the number of the newest checkpoint, -1 if there is none yet."""
    return max((int(path.name) for path in run.glob("checkpoints/*") if path.name.isdecimal()), default=-1)


def faults_of(run: Path, straight: Path, finished: Sequence[Trajectory]) -> list[str]:
    """Describe how a killed run differs from what it should be."""
    config = RunFolder(str(run)).read_config()
    if config["rollout"]["staleness"]:
        return batch_faults(run, config, finished)
    resumed = {int(t.uid.split("/")[1]) // config["rollout"]["groups"] + 1 for t in finished}
    views: dict[str, Callable[[Path], Mapping[str, Any]]] = {
        "record": functools.partial(records_of, resumed=resumed),
        "trajectories": files_of,
        "parameters": state_of,
    }
    return [x for what, of in views.items() for x in differences(f"{run}: {what}", of(run), of(straight))]


def differences(what: str, mine: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Describe the names whose values are not equal, or that only one side has."""
    return [f"{what} {name} differs" for name in sorted({*mine, *expected}) if mine.get(name) != expected.get(name)]


def records_of(run: Path, resumed: Collection[int]) -> dict[str, dict[str, Any]]:
    """Return the records of metrics by their index, without times.

    Those of `resumed` updates, of which an earlier start had finished some groups, are without the work of engine and
    tools, which had less to do.
    """
    records = {}
    for r in read_metrics(run / "metrics.jsonl"):
        left_out = ("time/", *WORK) if r["phase"] == "rl" and r["update"] in resumed else ("time/",)
        records[str(r["index"])] = {key: x for key, x in r.items() if not key.startswith(left_out)}
    return records


def files_of(run: Path) -> dict[str, bytes]:
    """Return the contents of the trajectory files by name."""
    return {path.name: path.read_bytes() for path in run.glob("trajectories/*")}


def state_of(run: Path) -> dict[str, bytes]:
    """Return the bytes of all arrays of the last checkpoint by name."""
    path = run.absolute() / "checkpoints" / str(newest_checkpoint(run)) / "state"
    leaves = jax.tree.leaves_with_path(ocp.StandardCheckpointer().restore(path))
    return {jax.tree_util.keystr(name): np.asarray(leaf).tobytes() for name, leaf in leaves}


def batch_faults(run: Path, config: Mapping[str, Any], finished: Sequence[Trajectory]) -> list[str]:
    """Describe what is wrong with the batches of a run whose rollouts are ahead of the learner."""
    c, faults = config["rollout"], []
    trained, written = dict[str, Trajectory](), RunFolder(str(run)).batch_files()
    for update in range(config["updates"]):
        batch = read_trajectories(written.get(update, ()))
        prompts = range(update * c["groups"], (update + 1) * c["groups"])
        expected = sorted(f"rl/{prompt:06d}/{sample}" for prompt in prompts for sample in range(c["samples"]))
        if sorted(t.uid for t in batch) != expected:
            faults.append(f"{run}: batch {update} has {sorted(t.uid for t in batch)}")
        versions = {version for t in batch for s in t.steps for version in s.tokens_by_version()}
        if ages := {update - version for version in versions} - set(range(c["staleness"] + 1)):
            faults.append(f"{run}: batch {update} has steps {ages} updates old")
        trained |= {t.uid: t for t in batch}
    again = {t.uid for t in finished if t.uid not in trained or sampled_tokens(t) != sampled_tokens(trained[t.uid])}
    return faults + [f"{run}: {uid} was finished, and is lost or was sampled again" for uid in sorted(again)]


def sampled_tokens(trajectory: Trajectory) -> list[tuple[bytes, bytes, dict[int, int]]]:
    """Return the ids and log-probs of every response, and the versions of its policies."""
    return [(s.response_ids.tobytes(), s.logprobs.tobytes(), s.tokens_by_version()) for s in trajectory.steps]


if __name__ == "__main__":
    configs.run_main(main, ["[train:--FLAG...]"])
