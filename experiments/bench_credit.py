"""Times every credit scheme on one large batch, compilation apart.

    python -m experiments.bench_credit [--trajectories=100000 --schemes=grpo,gigpo --json=FILE]

Groups of 8 trajectories of 16 steps of 8 tokens, about 50 states in a group. On 2 CPU cores, every scheme is to take
less than a second; the table shows the best of 3 runs. On a machine that others use too, processor seconds tell more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from agentr1_jax.credit import SCHEMES, CreditBatch, get_scheme

TRAJECTORIES = flags.DEFINE_integer("trajectories", 100_000, "in the batch", lower_bound=1)
NAMES = flags.DEFINE_list("schemes", sorted(SCHEMES), "those to time")
ROUNDS = flags.DEFINE_integer("rounds", 3, "the best of so many runs is shown", lower_bound=1)
JSON = flags.DEFINE_string("json", "", "file for the figures")
SEED = flags.DEFINE_integer("seed", 0, "of rewards, values and states")

GROUP, STEPS, TOKENS, STATES = 8, 16, 8, 50
BAR = 1.0
"""Seconds that a scheme may take."""


def random_batch(trajectories: int, seed: int) -> CreditBatch:
    """A batch without padding, as full as its capacities."""
    rng = np.random.default_rng(seed)
    steps, tokens = trajectories * STEPS, trajectories * STEPS * TOKENS
    rewards = rng.normal(size=steps).astype(np.float32)
    fields = {
        "rewards": rewards,
        "token_rewards": np.zeros(tokens, np.float32),
        "outcome": rewards.reshape(-1, STEPS).sum(1),
        "state_key": rng.integers(0, STATES, steps, np.int32),
        "values": rng.standard_normal(tokens, np.float32),
        "is_action": np.ones(tokens, bool),
        "token_step": np.arange(steps, dtype=np.int32).repeat(TOKENS),
        "traj_of_step": np.arange(trajectories, dtype=np.int32).repeat(STEPS),
        "group": np.arange(trajectories, dtype=np.int32) // GROUP,
        "bootstrap": np.zeros(trajectories, np.float32),
        "state_value": np.zeros(steps, np.float32),
        "greedy_reward": rng.standard_normal(trajectories, np.float32),
    }
    return CreditBatch(**jax.device_put(fields))


def timed(name: str, batch: CreditBatch) -> dict[str, float]:
    """Seconds of the fastest run of a scheme with its defaults, those of its processors, and seconds to compile it."""
    begin = time.perf_counter()
    assign = jax.jit(get_scheme(name, {})[1]).lower(batch).compile()
    compiled = time.perf_counter() - begin
    runs = []
    for _ in range(ROUNDS.value):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(assign(batch))
        runs.append((time.perf_counter() - begin, time.process_time() - begin_cpu))
    seconds, cpu_seconds = min(runs)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "compile_seconds": compiled}


def main(argv: Sequence[str]) -> None:
    """A row for each scheme, and the figures as JSON."""
    del argv
    batch = jax.block_until_ready(random_batch(TRAJECTORIES.value, SEED.value))
    tokens = batch.is_action.shape[0]
    table = Table(title=f"{TRAJECTORIES.value:,} trajectories, {batch.steps:,} steps, {tokens:,} tokens")
    for column in ("scheme", "seconds", "of all cores", "tokens per second", "compilation", ""):
        table.add_column(column, justify="left" if column == "scheme" else "right")
    figures = {}
    for name in NAMES.value:
        figures[name] = timed(name, batch)
        seconds, cpu, compiled = figures[name].values()
        slow = "" if seconds < BAR else f"over {BAR:g} s"
        table.add_row(name, f"{seconds:.3f}", f"{cpu:.3f}", f"{tokens / seconds:,.0f}", f"{compiled:.2f}", slow)
    Console().print(table)
    if JSON.value:
        with open(JSON.value, "w", encoding="utf-8") as out:
            json.dump(figures, out, indent=2)


if __name__ == "__main__":
    app.run(main)
