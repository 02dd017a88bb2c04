"""The two meshes of a run and what moves between them.

Learning is one global program over all processes; rolling out is one program per process on its own devices. The
parameters have one view for each: sharded on the learner's mesh, and whole on every device of a process for its engine.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentr1_jax.runtime.errors import UserError

AXES = ("data", "fsdp", "tensor")
ROWS = P(None, ("data", "fsdp"))
"""Layout of a batch [microbatches, rows, ...]."""


def learner_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
    """The mesh over all devices of all processes; `data` = -1 takes what the other axes leave.

    Raises:
      UserError: the axes do not multiply to the number of devices.
    """
    devices = jax.device_count()
    sizes = [max(devices // max(fsdp * tensor, 1), 1) if data == -1 else data, fsdp, tensor]
    if min(sizes) < 1 or np.prod(sizes) != devices:
        raise UserError(
            f"mesh {dict(zip(AXES, sizes, strict=True))} needs {np.prod(sizes)} devices, there are {devices}; "
            "set config.mesh.* so that they multiply to it (data = -1 takes the rest)"
        )
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def rollout_mesh() -> Mesh:
    """This process's devices; slots are sharded over its `data` axis."""
    devices = np.array(jax.local_devices()).reshape(-1, 1, 1)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@functools.cache
def _replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))


def rollout_view(params: Any, learner: Mesh, rollout: Mesh) -> Any:
    """The parameters whole on each device of the rollout mesh: resharded on the devices, then viewed without a copy."""
    whole = _replicate(learner)(params)
    local = set(rollout.devices.flat)

    def view(x: jax.Array) -> jax.Array:
        shards = [s.data for s in x.addressable_shards if s.device in local]
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(rollout, P()), shards)

    return jax.tree.map(view, whole)


def global_batch(batch: Any, mesh: Mesh) -> Any:
    """Joins every process's rows [microbatches, rows, ...] to global arrays."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(NamedSharding(mesh, ROWS), x), batch)


def local_rows(x: jax.Array, mesh: Mesh) -> np.ndarray:
    """This process's rows of an array [microbatches, rows, ...] that lies like a batch."""
    return np.asarray(multihost_utils.global_array_to_host_local_array(x, mesh, ROWS))
