"""Repeats rollouts in which a fifth of all tool calls goes wrong, and says whether anything grows meanwhile.

    python -m experiments.soak [--minutes=10]

Each rollout is 64 trajectories in groups of 8 on one small engine; their tools raise, hang, crash, return garbage or
too much, some of them blocking a thread. A line per minute shows resident memory, threads and counts; at the end the
slope of the memory over the time after warm-up.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import gc
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from rich.console import Console

from agentr1_jax.agents.base import Row, Session
from agentr1_jax.agents.session import Identity
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.params import init_decoder
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.rollout.config import EngineConfig
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.runner import Group, Limits, outcome_counts, run_groups
from agentr1_jax.rollout.sampling import Sampling
from agentr1_jax.runtime.mesh import learner_mesh
from agentr1_jax.tools import base
from agentr1_jax.tools.base import Tool, ToolResult
from agentr1_jax.tools.faulty import FaultPlan, FaultyTool
from agentr1_jax.tools.limits import ToolLimits, wrapped
from agentr1_jax.tools.meter import Meter
from agentr1_jax.trajectory import Outcome

MINUTES = flags.DEFINE_float("minutes", 10.0, "How long to go on.", lower_bound=0.1)

POLICY = DecoderConfig(vocab_size=256, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, hidden=128)
SHAPES = EngineConfig(
    slots=8,
    parking=8,
    length=128,
    decode_chunk=8,
    prefill_width=16,
    prefill_rows=(1, 4),
    attention_block=32,
    attention_slots=1,
)
GROUPS, SAMPLES, STEPS, PROMPT, RESPONSE = 8, 8, 3, 24, 8
TOOL = ToolLimits(seconds=0.05, attempts=2, backoff=0.005, characters=200)
WARM_UP = 0.2
"""Share of the time whose memory does not count: pools fill, caches of the allocator settle."""


class Echo:
    """A tool that cannot fail by itself."""

    name, description = "echo", "Says what it is told."
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}}
    blocking = False

    def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(f"echo {arguments['n']}")


@dataclasses.dataclass(frozen=True)
class Caller:
    """An agent that calls one of its tools after each response, whatever that says; every 50th hangs for good."""

    tools: Sequence[Tool]

    async def run(self, session: Session, row: Row) -> None:
        context = np.asarray(row["prompt"], np.int32)
        for step in range(STEPS):
            done = await session.generate(context, RESPONSE)
            if session.seed % 50 == 0 and step == 1:
                await asyncio.sleep(3600)
            result = await base.call(self.tools[session.seed % len(self.tools)], {"n": session.seed * STEPS + step})
            session.record(0.0, observation=result.content)
            if result.error is not None and result.error.fault == "infrastructure":
                session.finish(Outcome.TOOL_FAILURE)
                return
            observed = np.frombuffer(result.content.encode()[:16], np.uint8).astype(np.int32)
            context = np.concatenate([context, done.ids, observed])
        session.finish(Outcome.ENV_DONE)


@dataclasses.dataclass(frozen=True)
class Sample:
    """The process at some moment: seconds since the start, resident MiB, threads."""

    seconds: float
    memory: float
    threads: int


def look(began: float) -> Sample:
    """What the process holds now, garbage collected. Linux only."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return Sample(time.monotonic() - began, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, threading.active_count())


def slope(samples: Sequence[Sample]) -> tuple[float, float]:
    """Growth of memory by least squares and its standard error, MiB per minute."""
    if len(samples) < 3:
        return 0.0, float("inf")
    x = np.asarray([s.seconds / 60 for s in samples])
    y = np.asarray([s.memory for s in samples])
    x = x - x.mean()
    growth = float(x @ y / (x @ x))
    rest = y - y.mean() - growth * x
    return growth, float(np.sqrt(rest @ rest / (len(x) - 2) / (x @ x)))


def floor(samples: Sequence[Sample], blocks: int = 12) -> list[Sample]:
    """The lowest of each of so many stretches: what calls under way hold comes and goes, a leak lifts the floor."""
    parts = np.array_split(np.arange(len(samples)), min(blocks, len(samples)))
    return [min((samples[i] for i in part), key=lambda s: s.memory) for part in parts]


def faulty_tools(seed: int, injected: collections.Counter[str], meter: Meter) -> list[Tool]:
    """One whose hangs wait on the event loop, and one whose hangs block a thread."""
    plans = [
        FaultPlan(0.2, seed=seed, hang_seconds=0.5, latency_seconds=0.005, huge_characters=10**6, blocking=blocking)
        for blocking in (False, True)
    ]
    return [wrapped(FaultyTool(Echo(), plan, injected), TOOL, meter) for plan in plans]


def groups_of(index: int) -> list[Group]:
    """The groups of a rollout; no two rollouts have the same."""
    rng = np.random.default_rng(index)
    out = []
    for g in range(GROUPS):
        seeds = (index * GROUPS * SAMPLES + g * SAMPLES + k for k in range(SAMPLES))
        names = [Identity(f"soak/{seed}", g, k, "soak", seed) for k, seed in enumerate(seeds)]
        out.append(Group({"prompt": rng.integers(0, POLICY.vocab_size, PROMPT).tolist()}, names))
    return out


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.ERROR)  # Failures are what it is about; the counts tell of them.
    console, mesh = Console(), learner_mesh(-1, 1, 1)
    layout = shardings(jax.eval_shape(lambda: init_decoder(POLICY, jax.random.key(0))), mesh)
    params = jax.jit(lambda: init_decoder(POLICY, jax.random.key(0)), out_shardings=layout)()
    engine = Engine(POLICY, SHAPES, mesh)
    engine.compile(params)
    injected: collections.Counter[str] = collections.Counter()
    outcomes: collections.Counter[str] = collections.Counter()
    meter = Meter()
    began, index, told = time.monotonic(), 0, 0
    samples = [look(began)]
    while samples[-1].seconds < 60 * MINUTES.value:
        agent = Caller(faulty_tools(index, injected, meter))
        work = run_groups(
            *(engine, params, agent, groups_of(index)),
            sampling=Sampling(),
            policy_version=0,
            limits=Limits(attempts=2, seconds=1.5),
        )
        for group in work:
            outcomes.update(outcome_counts(group))
        index += 1
        assert outcomes.total() == index * GROUPS * SAMPLES, "a trajectory is missing"
        samples.append(look(began))
        if samples[-1].seconds // 60 > told:
            told = int(samples[-1].seconds // 60)
            tell(console, samples[-1], outcomes, injected, meter)
    tell(console, samples[-1], outcomes, injected, meter)
    late = [s for s in samples if s.seconds > WARM_UP * samples[-1].seconds]
    (all_growth, all_error), (growth, error) = slope(late), slope(floor(late))
    verdict = "grew" if growth > 2 * error and growth > 0.1 else "did not grow"
    console.print(
        f"Over the last {(late[-1].seconds - late[0].seconds) / 60:.1f} minutes memory {verdict}: its floor by "
        f"{growth:+.3f} ± {error:.3f} MiB/min (all {len(late)} samples {all_growth:+.3f} ± {all_error:.3f}); threads "
        f"{late[0].threads} to {late[-1].threads}.",
        soft_wrap=True,
    )


def tell(
    console: Console,
    now: Sample,
    outcomes: collections.Counter[str],
    injected: collections.Counter[str],
    meter: Meter,
) -> None:
    figures = meter.metrics()
    console.print(
        f"{now.seconds / 60:5.1f} min  {now.memory:7.1f} MiB  {now.threads} threads "
        f"({figures['tools/threads_left_behind']:.0f} left behind)  {dict(sorted(outcomes.items()))}  "
        f"{figures['tools/calls']:.0f} calls, injected {dict(sorted(injected.items()))}",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    app.run(main)
