"""The meshes of learner and engine, and what moves between them."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from agentr1_jax.errors import UserError
from agentr1_jax.policy.sharding import engine_formats, shardings
from agentr1_jax.runtime import mesh as meshes


def test_the_learner_mesh_spans_all_devices():
    mesh = meshes.learner_mesh(2, 2, 2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert set(mesh.devices.flat) == set(jax.devices())
    assert dict(meshes.learner_mesh(-1, 2, 2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert meshes.learner_mesh(-1, 1, 1).shape["data"] == 8


@pytest.mark.parametrize("sizes", [(2, 2, 1), (-1, 3, 1), (0, 1, 1), (-2, -4, 1), (-1, 0, 1), (-1, 16, 1)])
def test_axes_that_do_not_multiply_to_the_devices_are_refused(sizes):
    with pytest.raises(UserError, match=r"mesh \{'data': .*needs -?\d+ devices, there are 8; set config\.mesh"):
        meshes.learner_mesh(*sizes)


def view_of(tensor, prepare=lambda params: params):
    """A decoder on the learner's mesh, the rollout mesh, and what the engine sees of the decoder."""
    learner = meshes.learner_mesh(2, 2, 2)
    rollout = meshes.rollout_mesh(learner, tensor)
    params = tiny.decoder_params()
    sharded = jax.device_put(params, shardings(params, learner))
    with jax.transfer_guard("disallow"):
        return params, rollout, meshes.make_rollout_view(learner, rollout, shardings, prepare)(sharded)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_the_engine_sees_the_learners_parameters_with_heads_over_tensor_alone(tensor):
    params, rollout, view = view_of(tensor)
    assert dict(rollout.shape) == {"data": 8 // tensor, "fsdp": 1, "tensor": tensor}
    for seen, original in zip(jax.tree.leaves(view), jax.tree.leaves(params), strict=True):
        assert seen.sharding.mesh == rollout
        assert {shard.device for shard in seen.addressable_shards} == set(rollout.devices.flat)
        for shard in seen.addressable_shards:
            np.testing.assert_array_equal(shard.data, original[shard.index])
    heads = {"query": 4, "key": 2}
    for name, count in heads.items():
        local = view["layers"][name]["kernel"].addressable_shards[0].data.shape[2]
        assert local == (count // tensor if count % tensor == 0 else count), (
            "two key heads on four devices are replicated"
        )


def test_the_engine_sees_what_it_wants_of_the_parameters():
    params, _, view = view_of(1, prepare=lambda params: jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    assert {x.dtype for x in jax.tree.leaves(view)} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(view["embed"], params["embed"].astype(jnp.bfloat16))


def test_a_rollout_tensor_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match=r"rollout\.tensor is 3; it must divide the 8 devices of a process"):
        meshes.rollout_mesh(meshes.learner_mesh(2, 2, 2), 3)


@pytest.mark.parametrize(("apart", "learner", "tensor"), [(2, (3, 2, 1), 1), (4, (1, 2, 2), 4)])
def test_devices_for_rollouts_alone_get_a_copy(apart, learner, tensor):
    learning, rolling = meshes.split_devices(jax.devices(), apart)
    assert len(rolling) == apart and not set(learning) & set(rolling)
    mesh, rollout = meshes.learner_mesh(*learner, learning), meshes.rollout_mesh(rolling, tensor)
    params = tiny.decoder_params()
    sharded = jax.device_put(params, shardings(params, mesh))
    view = meshes.make_rollout_view(mesh, rollout, shardings, lambda params: params)(sharded)
    for seen, original in zip(jax.tree.leaves(view), jax.tree.leaves(params), strict=True):
        assert seen.sharding.mesh == rollout
        np.testing.assert_array_equal(seen, original)


@pytest.mark.parametrize("apart", [0, 4])
def test_the_engine_has_its_kernels_in_the_memory_layout_that_its_programs_want(apart):
    """As on TPU. Without the layout a program would lay them anew in every call."""
    learning, rolling = meshes.split_devices(jax.devices(), apart)
    mesh, rollout = meshes.learner_mesh(-1, 1, 2, learning), meshes.rollout_mesh(rolling, 2)
    params = tiny.decoder_params()
    formats = functools.partial(engine_formats, always=True)
    sharded = jax.device_put(params, shardings(params, mesh))
    view = meshes.make_rollout_view(mesh, rollout, shardings, lambda params: params, formats)(sharded)
    for seen, original in zip(jax.tree.leaves(view), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(seen, original)
    program = jax.jit(lambda params: params["layers"]["query"]["kernel"].sum()).lower(view).compile()
    wanted = program.input_formats[0][0]["layers"]["query"]["kernel"].layout.major_to_minor
    assert wanted == view["layers"]["query"]["kernel"].format.layout.major_to_minor == (0, 2, 1, 3)


def test_devices_that_serve_both_are_all_of_them():
    assert meshes.split_devices(jax.devices(), 0) == (jax.devices(), jax.devices())
    for apart in (8, -1, 9):
        with pytest.raises(UserError, match="must leave some of the 8 devices"):
            meshes.split_devices(jax.devices(), apart)


def test_a_batch_is_split_by_rows_and_comes_back():
    mesh = meshes.learner_mesh(2, 2, 2)
    batch = {"tokens": np.arange(2 * 8 * 3).reshape(2, 8, 3), "weight": np.arange(16.0, dtype=np.float32).reshape(2, 8)}
    placed = meshes.global_batch(batch, mesh)
    assert placed["tokens"].sharding.shard_shape(placed["tokens"].shape) == (2, 2, 3)
    for name, values in batch.items():
        np.testing.assert_array_equal(meshes.local_rows(placed[name], mesh), values)
    doubled = jax.jit(lambda x: 2 * x)(placed["tokens"])
    np.testing.assert_array_equal(meshes.local_rows(doubled, mesh), 2 * batch["tokens"])


def test_rows_of_a_result_that_lies_otherwise_come_back_too():
    mesh = meshes.learner_mesh(2, 2, 2)
    x = jax.device_put(jnp.arange(16.0).reshape(2, 8), NamedSharding(mesh, P()))
    np.testing.assert_array_equal(meshes.local_rows(x, mesh), np.arange(16.0).reshape(2, 8))


def pod(slices, hosts, chips, platform="tpu"):
    """Devices of a pod, those of the last process first: what a mesh asks of a device."""
    return [
        types.SimpleNamespace(slice_index=s, process_index=s * hosts + p, id=i, platform=platform)
        for s in reversed(range(slices))
        for p in reversed(range(hosts))
        for i in range(chips)
    ]


@pytest.mark.parametrize(("data", "fsdp", "tensor"), [(-1, 8, 1), (-1, 4, 2), (4, 2, 2), (16, 1, 1), (2, 2, 4)])
def test_only_data_crosses_the_network_between_slices(monkeypatch, data, fsdp, tensor):
    monkeypatch.setattr(meshes, "_make_mesh", lambda devices, sizes: np.array(devices).reshape(sizes))
    grid = meshes.learner_mesh(data, fsdp, tensor, pod(2, 2, 4))
    slices = np.vectorize(lambda device: device.slice_index)(grid)
    assert (slices == slices[:, :1, :1]).all()
    assert [d.process_index for d in grid.flat] == sorted(d.process_index for d in grid.flat)


def test_a_mesh_whose_parameters_span_slices_is_refused():
    message = r"mesh\.fsdp x mesh\.tensor is 16 x 1; it must divide the 8 devices of each of the 2 slices"
    with pytest.raises(UserError, match=message):
        meshes.axis_sizes(-1, 16, 1, pod(2, 2, 4))
    assert meshes.axis_sizes(-1, 16, 1, pod(2, 2, 4, platform="gpu")) == (1, 16, 1)
