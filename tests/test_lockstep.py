"""An engine over several processes: it samples what one process would, and who is lost is named."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest
import tiny
from lockstep_child import ENGINE, PROGRAM, ROWS, sampled, saved
from pair import run, run_two, start_two
from schedules import POLICY, assert_exact

from agentr1_jax.errors import UserError
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.executor import Executor
from agentr1_jax.rollout.lockstep import follow
from agentr1_jax.runtime.mesh import AXES
from agentr1_jax.trajectory import from_json
from configs import quickstart
from experiments import checks


def on_one_process(data, tensor, places):
    """What an engine on a mesh of this process samples."""
    mesh = tiny.mesh(data, 1, tensor)
    params = tiny.decoder_params()
    return sampled(Engine(POLICY, ENGINE, mesh), jax.device_put(params, shardings(params, mesh)), places)


def same(theirs, ours):
    """The tokens are equal, and the log-probabilities to 1e-5."""
    assert [t.uid for t in theirs] == [t.uid for t in ours]
    for their, our in zip(theirs, ours, strict=True):
        for one, other in zip(their.steps, our.steps, strict=True):
            np.testing.assert_array_equal(one.prompt_ids, other.prompt_ids)
            np.testing.assert_array_equal(one.response_ids, other.response_ids)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def in_order(shares):
    """The trajectories of several processes, or groups, by group and sample."""
    return sorted([t for share in shares for t in share], key=lambda t: (t.group, t.sample))


def shares_of(line):
    """Of each process, the trajectories that it was dealt."""
    return [[from_json(t) for group in share for t in group] for share in json.loads(line)]


@pytest.mark.slow
def test_two_processes_sample_what_one_does(tmp_path):
    """With the heads of a slot over both, of two key heads on four devices; and with the slots over both."""
    out, _ = run_two(PROGRAM, saved(tmp_path / "p"), "4", "2")
    lines = [line for line in out.splitlines() if line.startswith("[[")]
    for line, tensor in zip(lines, (4, 2), strict=True):
        shares = shares_of(line)
        assert [[t.group for t in share[::3]] for share in shares] == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
        together = in_order(shares)
        same(together, in_order(on_one_process(4 // tensor, tensor, range(len(ROWS)))))
        assert_exact(together)


@pytest.mark.slow
def test_two_engines_of_two_processes_each_go_their_own_way(tmp_path):
    out, *_ = run(4, 1, PROGRAM, saved(tmp_path / "p"), "2")
    shares = shares_of(next(line for line in out.splitlines() if line.startswith("[[")))
    assert [[t.group for t in share[::3]] for share in shares] == [[0, 4, 8], [2, 6], [1, 5], [3, 7]]
    for engine in range(2):
        same(in_order(shares[2 * engine :][:2]), in_order(on_one_process(1, 2, range(engine, len(ROWS), 2))))


def test_who_follows_computes_what_the_leader_does():
    """On other devices of this process, from the messages alone: one for each turn, one to open and one to close."""
    here = tiny.mesh(2, 1, 2)
    there = jax.sharding.Mesh(np.array(jax.devices()[4:]).reshape(2, 1, 2), AXES, axis_types=here.axis_types)
    messages, looks, outputs, params = [], [], [], tiny.decoder_params()
    leader = Engine(POLICY, ENGINE, here, messages.append)
    look = leader.device.look
    leader.device.look = lambda: looks.append(look()) or looks[-1]
    sampled(leader, jax.device_put(params, shardings(params, here)), range(len(ROWS)))
    calls = [name for message in messages for name, _ in message]
    counters = leader.counters
    assert (calls[0], calls[-1], calls.count("decode")) == ("open", "close", len(messages) - 2)
    counted = [counters.copy_calls, counters.prefill_calls, counters.decode_calls]
    assert [calls.count(name) for name in ("copy", "prefill", "decode")] == counted and min(counted) > 0

    follower = Executor(POLICY, ENGINE, there)
    decode = follower.decode
    follower.decode = lambda words: outputs.append(jax.device_get(decode(words))) or outputs[-1]
    follow(follower, jax.device_put(params, shardings(params, there)), messages)
    assert len(outputs) == len(looks) == calls.count("decode")
    for their, our in zip(jax.tree.leaves(outputs), jax.tree.leaves(looks), strict=True):
        np.testing.assert_array_equal(their, our)
    assert follower._cache is None


def test_the_parameters_stay_while_an_engine_over_several_processes_rolls_out():
    leader = Engine(POLICY, ENGINE, tiny.mesh(), lambda message: None)
    with pytest.raises(RuntimeError, match="keeps its parameters while it rolls out"):
        leader.device.use(tiny.decoder_params())


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "role"), [(0, "leads"), (1, "follows")])
def test_a_lost_process_is_named_by_the_other(tmp_path, lost, role):
    children = start_two(PROGRAM, saved(tmp_path / "p"), "rolls_out")
    try:
        for child in children:
            while child.stdout.readline() != "ready\n":
                assert child.poll() is None
        children[lost].kill()
        _, said = children[1 - lost].communicate(timeout=100)
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert children[1 - lost].returncode == 1
    assert f"error: process {lost} is lost, which {role} in the engine of process {1 - lost}" in said


@pytest.mark.slow
def test_a_leader_that_fails_ends_those_who_follow(tmp_path):
    children = start_two(PROGRAM, saved(tmp_path / "p"), "fails")
    said = [child.communicate(timeout=100)[1] for child in children]
    assert [child.returncode for child in children] == [1, 1]
    assert "RuntimeError: the leader's own mistake" in said[0]
    assert re.search(r"error: process 0 is lost, which leads in the engine of process 1", said[1])


class Device:
    """As much of a device as the checks ask for."""

    def __init__(self, process_index):
        self.process_index = process_index


@pytest.mark.parametrize(
    ("processes", "changes", "message"),
    [
        (1, {}, "rollout_processes is 2; it must divide the number of processes, which is 1"),
        (3, {"learner.rows": 9, "rollout.groups": 9}, "which is 3"),
        (2, {"mesh.rollout_processes": 0}, "rollout_processes is 0"),
        (2, {"rollout.staleness": 1}, r"rollout\.staleness is 1: rollouts and updates that overlap"),
        (2, {"mesh.rollout_devices": 1}, r"mesh\.rollout_devices is 1: .* uses all their devices"),
        (2, {"task.multihop.retriever.kind": "dense", "task.multihop.retriever.encoder": "x"}, r"'dense': .*kind=http"),
    ],
)
def test_what_cannot_be_in_lockstep_is_refused(processes, changes, message):
    config = quickstart.get_config()
    with config.unlocked():
        config.update_from_flattened_dict({"mesh.rollout_processes": 2} | changes)
    with pytest.raises(UserError, match=message):
        checks.check(config, [Device(i) for i in range(processes)])


def test_two_processes_can_be_in_lockstep():
    config = quickstart.get_config()
    config.mesh.rollout_processes = 2
    checks.check(config, [Device(0), Device(1)])
