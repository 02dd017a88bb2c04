"""The two meshes of a run and what moves between them.

Learning is one global program over all processes; rolling out is one program per process on its own devices. The
parameters have one view for each: sharded on the learner's mesh, and on the devices of each engine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentr1_jax.errors import UserError
from agentr1_jax.runtime import processes

AXES = ("data", "fsdp", "tensor")
ROWS = P(None, ("data", "fsdp"))
"""Layout of a batch [microbatches, rows, ...]."""


def learner_mesh(data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over all devices of all processes; `data` = -1 takes what the other axes leave.

    The devices of a process, in their own order, are a block of it. For a process feeds the rows of its own devices, so
    none may lie on devices of two; and its engine's mesh has that order. `jax.make_mesh` follows the wires alone: on a
    v5e:4x4 it puts a `tensor` of 4 across two hosts.

    Args:
      data, fsdp, tensor: sizes of the axes.
      devices: takes the place of all devices (those of a topology that is only compiled for).

    Raises:
      UserError: see `axis_sizes`.
    """
    devices = jax.devices() if devices is None else devices
    in_order = [d for own in _by_process(devices).values() for d in own]
    sizes = axis_sizes(data, fsdp, tensor, devices)
    return Mesh(np.array(in_order).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def axis_sizes(data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device]) -> tuple[int, int, int]:
    """Sizes of the learner's axes over these devices, `data` = -1 replaced.

    Raises:
      UserError: they do not multiply to the number of devices, processes have different numbers of them, or those of a
        process would not be a block of the mesh.
    """
    sizes = [max(len(devices) // max(fsdp * tensor, 1), 1) if data == -1 else data, fsdp, tensor]
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh {dict(zip(AXES, sizes, strict=True))} needs {math.prod(sizes)} devices, there are {len(devices)}; "
            "set config.mesh.* so that they multiply to it (data = -1 takes the rest)"
        )
    counts = [len(own) for own in _by_process(devices).values()]
    own, shards = counts[0], counts[0] // tensor
    if len(set(counts)) > 1:
        raise UserError(f"processes have {counts} devices; start each with as many as the others")
    if own % tensor:
        raise UserError(
            f"mesh.tensor is {tensor}; it must divide the {own} devices of a process, which feeds its own rows"
        )
    if fsdp % shards and shards % fsdp:
        raise UserError(
            f"mesh.fsdp is {fsdp}; it must divide the {shards} shards of a process ({own} devices, mesh.tensor "
            f"{tensor}), or be a multiple of them"
        )
    return sizes[0], fsdp, tensor


def _by_process(devices: Sequence[jax.Device]) -> dict[int, list[jax.Device]]:
    """The devices of each process, in order of process and their own."""
    return {
        index: [d for d in devices if d.process_index == index] for index in sorted({d.process_index for d in devices})
    }


def divided(devices: Sequence[jax.Device], apart: int) -> tuple[list[jax.Device], list[jax.Device]]:
    """The devices for learning and those for rollouts: the last `apart` of each process; with 0 all serve both.

    Raises:
      UserError: a process has no more than `apart` devices.
    """
    if not apart:
        return list(devices), list(devices)
    everywhere = _by_process(devices).values()
    fewest = min(map(len, everywhere))
    if not 0 < apart < fewest:
        raise UserError(
            f"mesh.rollout_devices is {apart}; it must leave some of the {fewest} devices of a process to the learner "
            "(0: all devices serve both)"
        )
    return [d for own in everywhere for d in own[:-apart]], [d for own in everywhere for d in own[-apart:]]


def rollout_mesh(devices: Mesh | Sequence[jax.Device], tensor: int = 1) -> Mesh:
    """The devices of this process's engine among those of a mesh or list; slots are dealt over `data`, heads over
    `tensor`.

    Args:
      devices: of all processes.
      tensor: size of the axis.

    Raises:
      UserError: `tensor` does not divide the devices of a process.
    """
    every = list(devices.devices.flat) if isinstance(devices, Mesh) else devices
    return _engine_mesh(_by_process(every)[processes.process_index()], tensor)


def rollout_shards(devices: int, tensor: int) -> int:
    """Size of the data axis of a rollout mesh over the devices of a process.

    Raises:
      UserError: `tensor` does not divide them.
    """
    if tensor < 1 or devices % tensor:
        raise UserError(f"rollout.tensor is {tensor}; it must divide the {devices} devices of a process")
    return devices // tensor


def _engine_mesh(own: Sequence[jax.Device], tensor: int) -> Mesh:
    shape = rollout_shards(len(own), tensor), 1, tensor
    return Mesh(np.array(own).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def make_rollout_view(
    learner: Mesh,
    rollout: Mesh,
    shardings: Callable[[Any, Mesh], Any],
    prepare: Callable[..., Any],
) -> Callable[..., Any]:
    """A function from parameters on the learner's mesh to what this process's engine wants, moved on the devices alone.

    They are resharded over the learner's devices with one more axis for the engines, along which they are whole; then
    each process looks at its own shards as its part of arrays of its engine. To rollout devices apart from the
    learner's they are copied from there.

    Args:
      learner: the learner's mesh.
      rollout: the mesh of this process's engine.
      shardings: (tree, mesh) -> shardings of its leaves.
      prepare: what the engine wants of the parameters, e.g. their compute dtype; its arguments are the function's.
    """
    by_process = _by_process(list(learner.devices.flat))
    tensor = math.gcd(rollout.shape["tensor"], learner.size // len(by_process))
    every = {process: _engine_mesh(own, tensor) for process, own in by_process.items()}
    own_mesh = every[processes.process_index()]
    apart = set(own_mesh.devices.flat) != set(rollout.devices.flat)
    stacked = np.stack([mesh.devices for mesh in every.values()])
    everywhere = Mesh(stacked, ("engine", *AXES), axis_types=(AxisType.Auto,) * stacked.ndim)

    @functools.cache
    def reshard(structure: Any, avals: Sequence[Any]) -> Callable[..., Any]:
        # By a constraint inside the program the compiler does not abide: some results come out whole on every device.
        result = jax.eval_shape(prepare, *jax.tree.unflatten(structure, avals))
        return jax.jit(prepare, out_shardings=shardings(result, everywhere))

    def view(*args: Any) -> Any:
        def own(x: jax.Array, sharding: NamedSharding) -> jax.Array:
            return jax.make_array_from_single_device_arrays(x.shape, sharding, [s.data for s in x.addressable_shards])

        leaves, structure = jax.tree.flatten(args)
        resharded = reshard(structure, tuple(map(jax.typeof, leaves)))(*args)
        local = jax.tree.map(own, resharded, shardings(resharded, own_mesh))
        return jax.device_put(local, shardings(local, rollout)) if apart else local

    return view


def global_batch(batch: Any, mesh: Mesh) -> Any:
    """Joins every process's rows [microbatches, rows, ...] to global arrays."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(NamedSharding(mesh, ROWS), x), batch)


def local_rows(x: jax.Array, mesh: Mesh) -> np.ndarray:
    """This process's rows of an array [microbatches, rows, ...] that lies like a batch."""
    return np.asarray(multihost_utils.global_array_to_host_local_array(x, mesh, ROWS))
