"""What does not fit the devices is one message at start: meshes, and whatever is dealt over processes and shards."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest
import tiny

from agentr1_jax.errors import UserError
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.runtime import mesh as meshes
from configs import quickstart
from experiments.checks import check_placement
from experiments.setup import read_settings

EVERYTHING_FITS = {
    "pretrain.updates": 4,
    "pretrain.rows": 16,
    "learner.rows": 16,
    "rollout.groups": 16,
    "rollout.slots": 16,
    "rollout.swap_slots": 16,
}


def machines(*counts):
    """Stand-ins for the devices of processes that have so many each."""
    return [types.SimpleNamespace(process_index=i) for i, count in enumerate(counts) for _ in range(count)]


def config(**changes):
    c = quickstart.get_config()
    c.update_from_flattened_dict(EVERYTHING_FITS | {k.replace("__", "."): v for k, v in changes.items()})
    return c


@pytest.mark.parametrize("counts", [(1,), (8,), (1, 1), (2, 2), (4, 4, 4, 4)])
def test_what_fits_is_not_refused(counts):
    check_placement(read_settings(config()), machines(*counts))


@pytest.mark.parametrize(
    ("counts", "changes", "message"),
    [
        ((1, 1, 1), {}, r"rollout\.groups \(16\) must be a multiple of processes x learner\.minibatches \(3 x 1\)"),
        ((2, 2), {"learner__minibatches": 3}, r"rollout\.groups \(16\) must be .* \(2 x 3\)"),
        ((1,) * 4, {"pretrain__batch": 42}, r"pretrain\.batch \(42\) must be a multiple of the 4 processes"),
        ((1,) * 4, {"warm_start__batch": 42}, r"warm_start\.batch \(42\) must be a multiple of the 4"),
        ((1,), {"learner__rows": 0}, r"learner\.rows is 0; it must be greater than or equal to 1"),
        (
            (2, 2),
            {"learner__rows": 6},
            r"learner\.rows \(6\) must be a multiple of the 4 shards of a batch \(mesh\.data x mesh\.fsdp: 4 x 1\)",
        ),
        ((4,), {"learner__rows": 6, "mesh__fsdp": 2}, r"learner\.rows \(6\) .* 4 shards .* 2 x 2\)"),
        ((4, 4), {"pretrain__rows": 12}, r"pretrain\.rows \(12\) must be a multiple of the 8 shards of a batch"),
        ((3, 3), {"learner__rows": 6, "pretrain__rows": 6}, r"rollout\.slots \(16\) must be .* the 3 data shards"),
        ((4, 4), {"rollout__slots": 6}, r"rollout\.slots \(6\) must be a multiple of the 4 data shards of the rollout"),
        ((4, 4), {"rollout__swap_slots": 6}, r"rollout\.swap_slots \(6\) must be a multiple of the 4 data shards"),
        ((4,), {"rollout__tensor": 3}, r"rollout\.tensor is 3; it must divide the 4 devices of a process"),
        ((4,), {"mesh__data": 3}, r"mesh \{'data': 3, 'fsdp': 1, 'tensor': 1\} needs 3 devices, there are 4; set"),
        ((2, 2), {"mesh__fsdp": 3}, r"mesh \{'data': 1, 'fsdp': 3, 'tensor': 1\} needs 3 devices, there are 4; set"),
        ((1,), {"mesh__tensor": 2}, r"needs 2 devices, there are 1"),
        ((4,), {"mesh__fsdp": 0}, r"mesh\.fsdp is 0; it must be greater than or equal to 1"),
        ((2, 2), {"mesh__tensor": 4}, r"mesh\.tensor is 4; it must divide the 2 devices of a process"),
        (
            (6, 6),
            {"mesh__fsdp": 4},
            r"mesh\.fsdp is 4; it must divide the 6 shards of a process \(6 devices, mesh\.ten",
        ),
        ((3, 1), {}, r"processes have \[3, 1\] devices; start each with as many as the others"),
        ((4,), {"mesh__rollout_devices": 4}, r"mesh\.rollout_devices is 4; it must leave some of the 4 devices"),
    ],
)
def test_what_does_not_fit_the_devices_is_refused(counts, changes, message):
    with pytest.raises(UserError, match=message):
        check_placement(read_settings(config(**changes)), machines(*counts))


def test_devices_for_rollouts_alone_hold_no_rows_of_a_batch():
    apart = {"mesh__rollout_devices": 2, "pretrain__updates": 0}
    check_placement(
        read_settings(config(learner__rows=6, rollout__slots=2, rollout__swap_slots=0, **apart)), machines(8)
    )
    with pytest.raises(UserError, match=r"learner\.rows \(8\) must be a multiple of the 6 shards"):
        check_placement(read_settings(config(learner__rows=8, **apart)), machines(8))
    with pytest.raises(UserError, match=r"rollout\.slots \(3\) must be a multiple of the 2 data shards"):
        check_placement(read_settings(config(learner__rows=6, rollout__slots=3, **apart)), machines(8))


@pytest.mark.parametrize("sizes", [(-1, 1, 1), (-1, 1, 2), (-1, 2, 2), (-1, 4, 1), (-1, 4, 4), (-1, 8, 1), (-1, 8, 2)])
def test_the_devices_of_a_process_are_a_block_of_the_mesh_in_their_own_order(sizes, monkeypatch):
    """Of devices that are named in any order; no row of a batch lies on devices of two processes."""
    monkeypatch.setattr(meshes, "Mesh", lambda devices, *_, **__: devices)
    devices = machines(4, 4, 4, 4)
    rng = np.random.default_rng(0)
    mixed = [devices[i] for i in rng.permutation(16)]
    own = {p: [d for d in mixed if d.process_index == p] for p in range(4)}
    mesh = meshes.learner_mesh(*sizes, mixed)
    for rows in mesh.reshape(-1, mesh.shape[2]):
        assert len({d.process_index for d in rows}) == 1
    for process in range(4):
        places = np.argwhere(np.vectorize(lambda d, p=process: d.process_index == p)(mesh))
        assert np.prod(places.max(0) - places.min(0) + 1) == len(places) == 4
        assert [mesh[tuple(place)] for place in places] == own[process]


@pytest.mark.parametrize(("sizes", "tensor"), [((4, 1, 2), 4), ((4, 2, 1), 4), ((2, 1, 4), 2)])
def test_the_engines_heads_may_be_dealt_otherwise_than_the_learners(sizes, tensor):
    """Left to itself the compiler keeps some of these parameters whole on every device."""
    learner = meshes.learner_mesh(*sizes)
    rollout = meshes.rollout_mesh(learner, tensor)
    params = tiny.decoder_params()
    sharded = jax.device_put(params, shardings(params, learner))
    view = meshes.make_rollout_view(learner, rollout, shardings, lambda params: params)(sharded)
    for seen, original in zip(jax.tree.leaves(view), jax.tree.leaves(params), strict=True):
        assert seen.sharding.mesh == rollout
        np.testing.assert_array_equal(seen, original)
