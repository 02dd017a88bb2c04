"""What a process does that shares an engine with another, in `test_lockstep.py`: PARAMETERS WHAT..."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys

import jax
import tiny
from schedules import CONFIG, POLICY, Planned, planned

from agentr1_jax.agents.session import Identity
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.lockstep import follow
from agentr1_jax.rollout.runner import Group, run_groups
from agentr1_jax.rollout.sampling import Sampling
from agentr1_jax.runtime import config, processes
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.team import Team, join
from agentr1_jax.trajectory import to_json

PROGRAM = "import lockstep_child; lockstep_child.run()"
ENGINE = dataclasses.replace(CONFIG, slots=4, parking=4, deterministic=True)
ROWS = [
    planned([*range(i, 12 + 2 * i)], {"max_tokens": 3 + i}, {"delay": 0.002 * (i % 3)}, {"rule": "window"})
    for i in range(9)
]
ENDLESS = [planned([5, 7], {"max_tokens": 8}, {"max_tokens": 8})] * 100_000
TOGETHER = 2


def sampled(engine, params, places, rows=ROWS):
    """Groups of three, of which one copies the prompt of another, for some of the rows, in order."""
    names = {i: [Identity(f"t/{i}/{k}", i, k, "planned", 1000 + 3 * i + k) for k in range(3)] for i in places}
    groups = [Group(rows[i], names[i]) for i in places]
    out = run_groups(engine, params, Planned(), groups, sampling=Sampling(1.0), policy_version=0)
    return sorted(out, key=lambda group: group[0].group)


def saved(path):
    """Keeps the parameters of the tests in a file, where a process finds them sooner than it makes them."""
    path.write_bytes(pickle.dumps(jax.device_get(tiny.decoder_params())))
    return str(path)


def shared_engine(team: Team, host, tensor: int):
    """The engine of this process and another one, and this one's part of the parameters."""
    learner = meshes.learner_mesh(-1, 1, 1)

    def placed(x, sharding):
        return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

    params = jax.tree.map(placed, host, shardings(host, learner))
    mesh = meshes.rollout_mesh(learner, tensor, TOGETHER)
    view = meshes.make_rollout_view(learner, mesh, shardings, lambda params: params, TOGETHER)(params)
    heads = view["layers"]["query"]["kernel"].addressable_shards
    assert {shard.data.shape[2] for shard in heads} == {POLICY.heads // tensor}
    return Engine(POLICY, ENGINE, mesh, team.teller), view


def sample(team: Team, host, tensor: int) -> None:
    """Samples `ROWS`, dealt over the engines; process 0 prints what each process got of it."""
    here, engines = processes.process_index(), processes.process_count() // TOGETHER
    (engine, view), groups = shared_engine(team, host, tensor), []
    if team.leads:
        with team.leading():
            assert engine.compile(view) == 4
            groups = sampled(engine, view, range(here // TOGETHER, len(ROWS), engines))
    else:
        with team.following() as messages:
            follow(engine.device.executor, view, messages)
    shares = processes.all_gather_json([[to_json(t) for t in group] for group in team.deal(groups)])
    if here == 0:
        sys.stdout.write(f"\n{json.dumps(shares)}\n")


def fail(team: Team, host, how: str) -> None:
    """Samples for ever, or fails."""
    engine, view = shared_engine(team, host, 4)
    processes.barrier()
    sys.stdout.write("\nready\n")
    sys.stdout.flush()
    if team.leads:
        with team.leading():
            if how == "fails":
                raise RuntimeError("the leader's own mistake")
            sampled(engine, view, range(len(ENDLESS)), ENDLESS)
    else:
        with team.following() as messages:
            follow(engine.device.executor, view, messages)


def main(argv):
    processes.initialize(heartbeat_seconds=20)
    team = join(TOGETHER)
    with open(argv[1], "rb") as file:
        host = pickle.load(file)
    for what in argv[2:]:
        sample(team, host, int(what)) if what.isdecimal() else fail(team, host, what)


def run() -> None:
    config.run_main(main, arguments=("PARAMETERS", "WHAT..."))
