"""Weak scaling on CPU devices: what more devices and processes cost, each with as much work as one alone has.

    python -m experiments.bench_scaling [--layouts=1x1,1x2,1x4,1x8,2x1,2x2 --rounds=7 --json=FILE]

A layout is processes x devices of each. Every layout is started in processes of its own and stays; then they take
turns: in a round each moves its parameters to the rollout mesh, rolls out, learns from what it sampled, and exchanges
once more what the processes told each other meanwhile. The learner's parameters are dealt over the devices of a process
(`fsdp`), its rows over all. Lengths are forced and tools take no time, so that all devices have equal work.

More devices than cores cannot be faster: what is told is how much longer a unit of work takes, by the clock and in
seconds of processors, of which what others do on the machine is no part. `--rows` splits the same work into more or
fewer microbatches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from agentr1_jax.agents.base import Row, Session
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.rollout.runner import run_groups
from agentr1_jax.runtime import processes
from agentr1_jax.runtime.compiles import CompileCounter
from agentr1_jax.runtime.memory import use_huge_pages
from agentr1_jax.trajectory import Outcome, Trajectory
from configs import base
from experiments import build, checks, circle, learning, phases
from experiments.circle import Run
from experiments.plan import device_bytes

LAYOUTS = flags.DEFINE_list("layouts", ["1x1", "1x2", "1x4", "1x8", "2x1", "2x2"], "processes x devices of each")
ROUNDS = flags.DEFINE_integer("rounds", 7, "times that each layout is run, one after the other in turn", lower_bound=1)
SLOTS = flags.DEFINE_integer("slots", 16, "responses decoded together on each device")
GROUPS = flags.DEFINE_integer("groups", 4, "task rows for each device, of 4 samples each")
ROWS = flags.DEFINE_integer("rows", 4, "rows of a microbatch on each device")
WIDTH = flags.DEFINE_integer("width", 128, "of the policy")
LAYERS = flags.DEFINE_integer("layers", 3, "of the policy")
JSON = flags.DEFINE_string("json", "", "file for the figures")
WORKER = flags.DEFINE_bool("worker", False, "is one of the processes of a layout, which a bench started")

SAMPLES, PROMPT, STEPS, RESPONSE, OBSERVATION = 4, 64, 3, 16, 16
VOCAB = 512
LENGTH = PROMPT + STEPS * (RESPONSE + OBSERVATION)
PHASES = ("view", "rollout", "learn", "exchange")
WARM_UPS = 2


@dataclasses.dataclass(frozen=True)
class Layout:
    """So many processes with so many devices each."""

    processes: int
    devices: int

    @classmethod
    def of(cls, name: str) -> Layout:
        """The layout that a flag names: 2x4."""
        return cls(*map(int, name.split("x")))

    @property
    def total(self) -> int:
        """Devices, and units of work."""
        return self.processes * self.devices


@dataclasses.dataclass(frozen=True)
class ForcedAgent:
    """Samples as many tokens in each step as every other trajectory does, and is rewarded by its place in its group."""

    async def run(self, session: Session, row: Row) -> None:
        """`STEPS` steps; each prompt adds an observation to what was before."""
        context = np.full(PROMPT, row["visit"] % VOCAB, np.int32)
        for _ in range(STEPS):
            completion = await session.generate(context, RESPONSE)
            session.record(float(session.seed % 2))
            context = np.concatenate([context, completion.ids, np.full(OBSERVATION, 7, np.int32)])
        session.finish(Outcome.ENV_DONE)


class Worker:
    """One process of a layout: the parts of a run on its devices."""

    def __init__(self) -> None:
        self.compiles = CompileCounter()
        config = base.get_config()
        own, total = jax.local_device_count(), jax.device_count()
        config.update_from_flattened_dict(
            {
                "mesh.fsdp": own,
                "budget.max_steps": STEPS,
                "budget.response_tokens": RESPONSE,
                "budget.context_tokens": LENGTH,
                "rollout.groups": GROUPS.value * total,
                "rollout.samples": SAMPLES,
                "rollout.slots": SLOTS.value * own,
                "rollout.parking": 0,
                "rollout.length": LENGTH,
                "rollout.attention_block": LENGTH // 2,
                "rollout.prefill_rows": (8,),
                "learner.rows": ROWS.value * total,
                "learner.row_tokens": LENGTH,
                "learner.row_reads": STEPS * RESPONSE + 1,
            }
        )
        checks.check(config)
        policy = DecoderConfig(
            vocab_size=VOCAB, width=WIDTH.value, layers=LAYERS.value, heads=4, kv_heads=2, head_dim=32, hidden=352
        )
        learner_mesh, rollout_mesh = build.learner_mesh(config), build.rollout_mesh(config)
        task: Any = types.SimpleNamespace(name="bench", row=lambda split, visit: {"visit": visit})
        nobody: Any = None
        view = build.rollout_view(policy, learner_mesh, rollout_mesh)
        engine, agent = build.engine(config, policy, rollout_mesh), ForcedAgent()
        self.run = Run(config, task, nobody, agent, policy, {}, engine, learner_mesh, view, nobody)  # type: ignore[arg-type]
        fresh, _, (optimizer, _, layout) = build.learner_state(config, policy, learner_mesh)
        self.state, self.learner = fresh(), phases.reinforced(self.run, optimizer, layout, None)
        self.told: list[bytes] = []
        self.update = self.warm = 0
        for _ in range(WARM_UPS):
            self.round()
        self.warm = self.compiles.count

    def round(self) -> dict[str, Any]:
        """One turn of the circle: seconds and processor seconds of each phase, and what tells that nothing else was."""
        run, c = self.run, self.run.config.rollout
        out: dict[str, Any] = {}
        with timed(out, "view"):
            view = jax.block_until_ready(run.view(self.state.params, run.frozen))
        visits = range(self.update * c.groups, (self.update + 1) * c.groups)
        places = build.dealt(c.groups)
        with timed(out, "rollout"):
            groups = circle.groups_of(run, "rl", "train", places, [visits[i] for i in places], c.samples)
            work = run_groups(
                run.engine,
                view,
                run.agent,
                groups,
                sampling=build.sampling(run.config),
                policy_version=self.update,
                limits=build.limits(run.config),
            )
            trajectories = [t for group in work for t in group]
        told: list[bytes] = []
        gather = processes.all_gather_bytes

        def noted(payload: bytes) -> list[bytes]:
            told.append(payload)
            return gather(payload)

        with timed(out, "learn"), mock.patch.object(processes, "all_gather_bytes", noted):
            self._learn(trajectories)
        with timed(out, "exchange"):
            for payload in told:
                processes.all_gather_bytes(payload)
        return out | {
            "exchanges": len(told),
            "exchanged_bytes": sum(map(len, told)),
            "gathered_bytes": device_bytes(view) - device_bytes(self.state.params),
            "tokens": sum(len(s.response_ids) for t in trajectories for s in t.steps),
            "compiled": self.compiles.count,
            "recompiles": self.compiles.count - self.warm,
        }

    def _learn(self, trajectories: Sequence[Trajectory]) -> None:
        rates = dict.fromkeys(self.state.params, 1e-5)
        self.state, pending, _ = learning.learn(self.run, self.learner, self.state, trajectories, rates)
        metrics = pending.result()
        assert (
            metrics["batch/trajectories"] == self.run.config.rollout.groups * SAMPLES and not metrics["batch/dropped"]
        )
        self.update += 1


@contextlib.contextmanager
def timed(out: dict[str, Any], name: str) -> Iterator[None]:
    """Leaves in `out` how long the block took, from when all processes are there, and of how much of its processors."""
    processes.barrier()
    seconds, processor = time.perf_counter(), time.process_time()
    yield
    out[name] = {"seconds": time.perf_counter() - seconds, "processor": time.process_time() - processor}


def work() -> None:
    """A process of a layout: says when it is ready, and does a round for every line that it is sent."""
    processes.initialize()
    worker = Worker()
    tell({"ready": True})
    for _ in sys.stdin:
        tell(worker.round())


def tell(record: Mapping[str, Any]) -> None:
    """One line for who started this process."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


class Team:
    """The processes of a layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "AGENTR1_CPU_DEVICES": str(layout.devices)}
        if layout.processes > 1:
            environment |= {"AGENTR1_COORDINATOR": address, "AGENTR1_NUM_PROCESSES": str(layout.processes)}
        command = [sys.executable, "-m", "experiments.bench_scaling", "--worker", *sys.argv[1:]]
        self._members = [
            subprocess.Popen(
                command,
                env=environment | {"AGENTR1_PROCESS_ID": str(index)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(layout.processes)
        ]

    def heard(self) -> list[dict[str, Any]]:
        """The next line of each process. Raises RuntimeError if one has ended."""
        return [self._line(member) for member in self._members]

    def _line(self, member: subprocess.Popen[str]) -> dict[str, Any]:
        assert member.stdout
        for line in member.stdout:
            if line.startswith("{"):  # The collectives talk on the same channel.
                return json.loads(line)
        raise RuntimeError(f"a process of {self.layout} has ended; its messages are above")

    def round(self) -> list[dict[str, Any]]:
        """What each process says of one round."""
        for member in self._members:
            assert member.stdin
            member.stdin.write("round\n")
            member.stdin.flush()
        return self.heard()

    def end(self) -> None:
        """Ends its processes: together, since each waits for the others."""
        for member in self._members:
            assert member.stdin
            member.stdin.close()
        for member in self._members:
            try:
                member.wait(20)
            except subprocess.TimeoutExpired:
                member.kill()


def joined(members: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """A round of a layout: seconds until the last process was done, processor seconds and bytes of all."""
    out: dict[str, float] = {}
    for phase in PHASES:
        out[phase] = max(m[phase]["seconds"] for m in members)
        out[f"{phase}_processor"] = sum(m[phase]["processor"] for m in members)
    for key in ("exchanged_bytes", "tokens"):
        out[key] = sum(m[key] for m in members)
    return out | {
        key: max(m[key] for m in members) for key in ("exchanges", "gathered_bytes", "compiled", "recompiles")
    }


def figures(rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds of each layout, and how they compare with those of the first.

    `*_per_work`: seconds for each device's share, over the first layout's; `*_processor_per_work`: of processors'
    seconds likewise. `*_spread`: the largest less the smallest of the rounds' seconds, over their median.
    `exchange_share`: of a whole round.
    """
    medians = {name: {key: float(np.median([r[key] for r in own])) for key in own[0]} for name, own in rounds.items()}
    first_name = next(iter(medians))
    first, units = medians[first_name], Layout.of(first_name).total
    out = {}
    for name, own in medians.items():
        share = Layout.of(name).total / units
        extra = {"exchange_share": own["exchange"] / sum(own[phase] for phase in PHASES[:-1])}
        for phase in ("rollout", "learn"):
            extra[f"{phase}_per_work"] = own[phase] / share / first[phase]
            processor = f"{phase}_processor"
            extra[f"{processor}_per_work"] = own[processor] / share / first[processor]
            seconds = [r[phase] for r in rounds[name]]
            extra[f"{phase}_spread"] = (max(seconds) - min(seconds)) / own[phase]
        out[name] = own | extra
    return out


def show(console: Console, out: Mapping[str, Mapping[str, float]]) -> None:
    """The figures as a table."""
    table = Table(title="weak scaling: a round of each layout, medians; ratios are of a unit of work, to the first")
    columns = {
        "layout": lambda name, x: name,
        "rollout s": lambda _, x: f"{x['rollout']:.2f} ± {x['rollout_spread']:.0%}",
        "ratio": lambda _, x: f"{x['rollout_per_work']:.2f}",
        "processors": lambda _, x: f"{x['rollout_processor_per_work']:.2f}",
        "update s": lambda _, x: f"{x['learn']:.2f} ± {x['learn_spread']:.0%}",
        "ratio ": lambda _, x: f"{x['learn_per_work']:.2f}",
        "processors ": lambda _, x: f"{x['learn_processor_per_work']:.2f}",
        "reshard ms": lambda _, x: f"{1e3 * x['view']:.1f}",
        "MiB gathered": lambda _, x: f"{x['gathered_bytes'] / 2**20:.2f}",
        "exchange ms": lambda _, x: f"{1e3 * x['exchange']:.1f} ({x['exchange_share']:.1%})",
        "exchanges": lambda _, x: f"{x['exchanges']:.0f}, {x['exchanged_bytes'] / 1024:.0f} KiB",
        "compiled": lambda _, x: f"{x['compiled']:.0f} + {x['recompiles']:.0f}",
    }
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in out.items():
        table.add_row(*(cell(name, row) for cell in columns.values()))
    console.print(table)


def main(argv: Sequence[str]) -> None:
    """Starts all layouts, lets them take turns, and shows what came of it."""
    del argv
    if WORKER.value:
        return work()
    teams: dict[str, Team] = {}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in LAYOUTS.value}
    try:
        for name in LAYOUTS.value:  # One after the other: they compile on all cores.
            teams[name] = Team(Layout.of(name))
            teams[name].heard()
        for _ in range(ROUNDS.value):
            for name, team in teams.items():
                rounds[name].append(joined(team.round()))
    finally:
        for team in teams.values():
            team.end()
    out = figures(rounds)
    show(Console(width=180), out)
    if JSON.value:
        with open(JSON.value, "w", encoding="utf-8") as file:
            json.dump({"layouts": out, "rounds": rounds}, file, indent=2)


if __name__ == "__main__":
    use_huge_pages()
    app.run(main)
