"""Time one update on the same trajectories in all packing modes, and check that all have one gradient.

    python -m experiments.bench_learner [--steps=2,4,8,16,32 --json=FILE]

    per_step_padded  a row for each step, padded to the longest, as published systems lay them out
    per_step         the same steps, several to a row
    trajectory       every trajectory once: a step adds only what its prompt adds to the steps before
    prefix_tree      every group once: its trajectories share their prompt

A group of 8 trajectories, a prompt of 64 tokens, 16 response and 24 observation tokens a step. A last case has a prompt
8 times as long as what a trajectory adds to it. Rows are as long as the longest sequence; those of `prefix_tree` hold
1, 2, 4 or 8 trajectories.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from agentr1_jax.learner.batch import Batch, to_microbatches
from agentr1_jax.learner.config import PACKING_MODES, LossConfig, Objective, OptimizerConfig, PackingConfig, PackingMode
from agentr1_jax.learner.optimizer import make_optimizer
from agentr1_jax.learner.packing import Packing, pack, scatter_fields
from agentr1_jax.learner.update import LearnerState, batch_gradient, init_state, make_update
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.params import init_params
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.runtime.mesh import global_batch, learner_mesh
from agentr1_jax.runtime.processes import use_huge_pages
from agentr1_jax.trajectory import Outcome, Step, Trajectory

STEPS = flags.DEFINE_list("steps", ["2", "4", "8", "16", "32"], "steps of a trajectory, for each case")
ROUNDS = flags.DEFINE_integer("rounds", 5, "times that each mode runs, the modes in turn")
JSON = flags.DEFINE_string("json", "", "file for the figures")
SEED = flags.DEFINE_integer("seed", 0, "of ids and advantages")

CHECKED_STEPS, ROUND_TO = 8, 8
"""Gradients are compared up to so many steps; rows are a multiple of so many tokens."""
GROUP, PROMPT, RESPONSE, OBSERVATION = 8, 64, 16, 24
LONG_PROMPT_STEPS, LONG_PROMPT = 4, 8 * (4 * (RESPONSE + OBSERVATION) - OBSERVATION)
MICROBATCH = 2700
"""A microbatch is the power of two of rows that has at most so many tokens."""
TREE_ROW = 2600
PATIENCE = 60.0
"""Seconds of measurement after which a mode is not run again."""
OBJECTIVE = Objective(LossConfig(chunk=512))


@dataclasses.dataclass(frozen=True)
class Case:
    """One mode's batch of one size.

    Attributes:
      tokens: packed tokens without padding.
      batch, count: on the device, and its microbatches.
      update: compiled for it.
      peak_bytes: of the compiled program, as the compiler counts them.
    """

    tokens: int
    batch: Batch
    count: np.int32
    update: Any
    peak_bytes: int


def make_group(steps: int, prompt: int, seed: int) -> list[Trajectory]:
    """Return a group of trajectories with random ids: `steps` steps that append to one shared prompt."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> np.ndarray:
        return rng.integers(0, 4096, count).astype(np.int32)

    def trajectory(sample: int) -> Trajectory:
        context, made = opening, []
        for _ in range(steps):
            response = ids(RESPONSE)
            logprobs = rng.normal(-math.log(4096), 0.1, RESPONSE).astype(np.float32)
            made.append(Step(context, response, logprobs, reward=0.0))
            context = np.concatenate([context, response, ids(OBSERVATION)])
        return Trajectory(
            uid=str(sample),
            group=0,
            sample=sample,
            task="bench",
            seed=seed,
            steps=tuple(made),
            outcome=Outcome.ENV_DONE,
        )

    opening = ids(prompt)
    return [trajectory(sample) for sample in range(GROUP)]


def lay_out(trajectories: Sequence[Trajectory], mode: PackingMode, row_tokens: int, seed: int) -> tuple[Packing, Any]:
    """Return the packing, and its loss tokens with seeded advantages and the weights of a mean over tokens."""
    layout = pack(trajectories, PackingConfig(mode, row_tokens, row_tokens, rows=1), final_values=False)
    count = len(layout.token_index)
    advantages = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    weights = np.full(count, 1 / count, np.float32)
    return layout, scatter_fields(layout, {"advantage": advantages, "weight": weights})


def row_length(trajectories: Sequence[Trajectory], mode: PackingMode) -> int:
    """Return the longest sequence, or for `prefix_tree` those of a group that `TREE_ROW` tokens take; rounded up."""
    longest = max(len(s.prompt_ids) + len(s.response_ids) for t in trajectories for s in t.steps)
    prompt = len(trajectories[0].steps[0].prompt_ids)
    if mode == "prefix_tree":
        together = [prompt + (longest - prompt) * count for count in (1, 2, 4, GROUP)]
        longest = max(together[0], *(tokens for tokens in together if tokens <= TREE_ROW))
    return -(-longest // ROUND_TO) * ROUND_TO


class Bench:
    """The policy, its optimizer and the compiled programs that all cases share."""

    def __init__(self) -> None:
        self.policy = DecoderConfig(vocab_size=4096, width=256, layers=4, heads=4, kv_heads=2, head_dim=64, hidden=768)
        self.mesh = learner_mesh(1, 1, 1, jax.devices()[:1])
        self.optimizer = make_optimizer(OptimizerConfig())
        make = functools.partial(init_params, self.policy, jax.random.key(SEED.value))
        self.layout = shardings(jax.eval_shape(lambda: init_state(make(), self.optimizer)), self.mesh)
        self.fresh: Callable[[], LearnerState] = jax.jit(
            lambda: init_state(make(), self.optimizer), out_shardings=self.layout
        )
        self.update: Any = make_update(self.policy, OBJECTIVE, self.optimizer, self.layout)
        self.gradient: Any = jax.jit(batch_gradient(self.policy, OBJECTIVE, self.mesh))
        self.rates = {"decoder": np.float32(1e-5)}

    def case(self, trajectories: Sequence[Trajectory], mode: PackingMode) -> Case:
        """Lay a mode's rows out and compile its update."""
        row_tokens = row_length(trajectories, mode)
        layout, loss_tokens = lay_out(trajectories, mode, row_tokens, SEED.value)
        rows = min(2 ** int(math.log2(max(MICROBATCH / row_tokens, 1))), layout.rows)
        count = -(-layout.rows // rows)
        batch = global_batch(
            to_microbatches(layout.packed_tokens, loss_tokens, microbatches=count, rows=rows), self.mesh
        )
        compiled = self.update.lower(self.fresh(), {}, batch, np.int32(count), self.rates).compile()
        memory = compiled.memory_analysis()
        peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        return Case(layout.tokens_computed, batch, np.int32(count), compiled, peak - memory.alias_size_in_bytes)


def time_updates(bench: Bench, cases: Mapping[PackingMode, Case]) -> dict[PackingMode, float]:
    """Return the median seconds of an update in each mode, the modes in turn."""
    seconds: dict[PackingMode, list[float]] = {mode: [] for mode in cases}
    states = {mode: bench.fresh() for mode in cases}
    for attempt in range(ROUNDS.value + 1):
        for mode, case in cases.items():
            if sum(seconds[mode]) > PATIENCE:
                continue
            jax.block_until_ready(states[mode])
            begin = time.perf_counter()
            states[mode], metrics = case.update(states[mode], {}, case.batch, case.count, bench.rates)
            jax.block_until_ready((states[mode], metrics))
            took = time.perf_counter() - begin
            # The first run touches its memory for the first time, which matters where it is short.
            seconds[mode] += [took] if attempt or took > PATIENCE / 6 else []
    return {mode: float(np.median(x)) for mode, x in seconds.items()}


def gradient_error(bench: Bench, cases: Mapping[PackingMode, Case]) -> float:
    """Return the largest difference of a gradient from that of the first mode, relative to its leaf's largest entry."""
    params = bench.fresh().params
    grads = {mode: bench.gradient(params, {}, case.batch, case.count)[0] for mode, case in cases.items()}
    reference = grads.pop(next(iter(grads)))

    def error(one: jax.Array, other: jax.Array) -> float:
        return float(np.abs(np.asarray(one) - np.asarray(other)).max() / np.abs(np.asarray(other)).max())

    return max(max(jax.tree.leaves(jax.tree.map(error, g, reference))) for g in grads.values())


def main(argv: Sequence[str]) -> None:
    """Run all cases; print a table and write the figures as JSON."""
    del argv
    bench, console = Bench(), Console()
    rows, errors = list[dict[str, Any]](), list[float]()
    sizes = [(int(steps), PROMPT, tuple(PACKING_MODES)) for steps in STEPS.value]
    for steps, prompt, modes in [*sizes, (LONG_PROMPT_STEPS, LONG_PROMPT, ("trajectory", "prefix_tree"))]:
        trajectories = make_group(steps, prompt, SEED.value)
        cases = {mode: bench.case(trajectories, mode) for mode in modes}
        if steps <= CHECKED_STEPS:
            errors.append(gradient_error(bench, cases))
        seconds = time_updates(bench, cases)
        for mode, case in cases.items():
            rows.append(
                {
                    "prompt": prompt,
                    "steps": steps,
                    "mode": mode,
                    "seconds": round(seconds[mode], 3),
                    "tokens": case.tokens,
                    "peak MiB": round(case.peak_bytes / 2**20),
                    "times as fast": round(seconds[modes[0]] / seconds[mode], 2),
                }
            )
        console.print(f"{steps} steps: " + ", ".join(f"{mode} {seconds[mode]:.3f} s" for mode in modes))
    table = Table(*rows[0], title="one update; times as fast as the first mode of its size")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    console.print(f"gradients differ by at most {max(errors):.1e} of their largest entry")
    if JSON.value:
        with open(JSON.value, "w", encoding="utf-8") as out:
            json.dump({"rows": rows, "max_relative_gradient_error": max(errors)}, out, indent=2)


if __name__ == "__main__":
    use_huge_pages()
    app.run(main)
