"""Folders of runs that never ran: config, tokenizer, metrics and trajectories of any number and length.

    python tests/recorded_runs.py FOLDER [updates] [steps] [response tokens]

A few distinct trajectories are repeated, so that 25,600 of 8,000 tokens are written in seconds.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import numpy as np

from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.run_folder import RunFolder, batch_name
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build
from agentr1_jax.trajectory import Outcome, Step, Term, Trajectory
from agentr1_jax.trajectory_io import to_json
from configs import quickstart
from experiments.setup import change_config, make_task, read_settings

GROUPS, SAMPLES = 16, 8
DISTINCT = 16


def write_run(folder: Path, updates: int, *, steps: int = 4, response: int = 12, evaluated: int = 32) -> None:
    """Write a run of `updates` batches of 16 groups of 8 trajectories, and two evaluations.

    Args:
      folder: to write to.
      updates: RL batches.
      steps: of a trajectory.
      response: tokens of a response; observations have four times as many.
      evaluated: trajectories of an evaluation.
    """
    config = change_config(quickstart.get_config(), {"run_dir": str(folder), "updates": updates + 1})
    settings = read_settings(config)
    tokenizer = build.make_tokenizer(settings, make_task(settings, ToolMetrics()), resumes=False)
    RunFolder(str(folder)).write_config(configs.resolve(config))
    parts = [line_parts(random_trajectory(k, tokenizer.vocab_size, steps, response)) for k in range(DISTINCT)]
    names = {batch_name(u): ("rl", u * GROUPS, SAMPLES, GROUPS * SAMPLES) for u in range(updates)}
    names |= {name: (name, 0, 1, evaluated) for name in ("eval_before", "eval_000001")}
    (folder / "trajectories").mkdir()
    for name, (phase, first, samples, count) in names.items():
        with open(folder / "trajectories" / f"{name}.jsonl.gz", "wb") as out:
            for k in range(count):
                out.write(line(parts[(k * 7 + first) % DISTINCT], phase, first, k // samples, k % samples))
    with open(folder / "metrics.jsonl", "w") as out:
        for u in range(updates):
            record = {"index": u, "phase": "rl", "update": u + 1, "rollout/reward": 0.5, "rollout/em": u / updates}
            out.write(json.dumps(record) + "\n")


def random_trajectory(seed: int, vocab: int, steps: int, response: int) -> Trajectory:
    """A trajectory of random tokens; every second one of a group goes its own way at its second step."""
    rng, shared = np.random.default_rng(seed), np.random.default_rng(0)
    prompt, out = shared.integers(0, vocab, 4 * response).astype(np.int32), []
    reward = round(float(rng.uniform(-0.3, 1.2)), 2)
    for t in range(steps):
        source = shared if seed % 2 == 0 or t == 0 else rng
        ids = source.integers(0, vocab, response).astype(np.int32)
        last = t == steps - 1
        terms = {"outcome in its group": Term({"return": reward}, {"group mean": 0.4}, std=0.25)}
        terms |= {"process": Term({"reward to come": 0.1 * t}, weight=0.5)}
        out.append(
            Step(
                prompt_ids=prompt,
                response_ids=ids,
                logprobs=-rng.exponential(0.4, response).astype(np.float32),
                reward=reward if last else 0.0,
                observation="" if last else "passage " * response,
                tool_calls=()
                if last
                else ({"name": "search", "arguments": {"query": f"query {t} {ids[0]}"}, "ok": True},),
                state_key=f"docs:{t}",
                advantages=np.full(response, sum(term.total for term in terms.values()), np.float32),
                account=terms,
                values=rng.normal(0.4, 0.2, response).astype(np.float16),
                value_targets=np.full(response, reward, np.float16),
            )
        )
        prompt = np.concatenate([prompt, ids, rng.integers(0, vocab, 4 * response).astype(np.int32)])
    row = {"question": f"Where was the director of film {seed} born?", "answers": ["Tolmezzo"], "kind": "bridge2"}
    metrics = {"em": float(reward > 0.8)}
    return Trajectory("uid", 0, 0, "hopworld", seed, tuple(out), Outcome.ANSWERED, metrics=metrics, row=row)


def line_parts(trajectory: Trajectory) -> bytes:
    """The rest of the line of a trajectory, behind uid, group and sample, compressed."""
    record = to_json(trajectory)
    rest = json.dumps({key: value for key, value in record.items() if key not in ("uid", "group", "sample")})
    return gzip.compress(f", {rest[1:]}\n".encode(), 5, mtime=0)


def line(rest: bytes, phase: str, first: int, group: int, sample: int) -> bytes:
    """A line of a trajectory file; gzip files may follow each other."""
    head = json.dumps({"uid": f"{phase}/{first + group:06d}/{sample}", "group": group, "sample": sample})
    return gzip.compress(head[:-1].encode(), 1, mtime=0) + rest


if __name__ == "__main__":
    where, *sizes = sys.argv[1:]
    updates, steps, response = map(int, [*sizes, *("200", "8", "200")[len(sizes) :]])
    write_run(Path(where), updates, steps=steps, response=response, evaluated=256)
