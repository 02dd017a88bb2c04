"""The meshes of a run, and the arrays that move between them.

Learning is one global program over all processes; rolling out is one program per process on its own devices. The
parameters are sharded on the learner's mesh, and have a view on the devices of each engine.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import numpy as np
from annotated_types import Ge
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pydantic.dataclasses import dataclass

from agentr1_jax.errors import UserError
from agentr1_jax.runtime import processes
from agentr1_jax.validation import STRICT, Count, Whole

AXES = ("data", "fsdp", "tensor")
ROWS = P(None, ("data", "fsdp"))
"""Sharding of a batch [microbatches, rows, ...]."""


@dataclass(frozen=True, config=STRICT)
class MeshConfig:
    """Placement on devices: section `mesh` of a config.

    Attributes:
      data: size of the learner's axis over which batches are sharded; -1 takes the devices that the others leave.
      fsdp: size of the axis over which batches and parameters are sharded.
      tensor: size of the axis over which heads and hidden units are sharded.
      rollout_devices: devices of each process that serve rollouts alone; 0 lets learner and engine share all devices.
    """

    data: Annotated[int, Ge(-1)] = -1
    fsdp: Count = 1
    tensor: Count = 1
    rollout_devices: Whole = 0

    def __post_init__(self) -> None:
        if self.data == 0:
            raise ValueError("data is 0; it must be at least 1, or -1 for the devices that the other axes leave")


def learner_mesh(data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the mesh over these devices of all processes (None: all devices); `axis_sizes` checks the sizes.

    The devices of a process are a block of it, in their own order: a process feeds the rows of its own devices, so no
    row may lie on devices of two processes, and the mesh of its engine has the same order. `jax.make_mesh` looks at the
    wiring alone: on a v5e:4x4 it puts a `tensor` axis of 4 across two hosts. The processes of a TPU slice are a block,
    too: only `data`, the outermost axis, crosses the network between slices, by one reduction of the gradients.
    """
    devices = jax.devices() if devices is None else devices
    in_order = [d for own in _by_process(devices).values() for d in own]
    return _make_mesh(in_order, axis_sizes(data, fsdp, tensor, devices))


def _make_mesh(devices: Sequence[jax.Device], sizes: tuple[int, int, int]) -> Mesh:
    return Mesh(np.array(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def axis_sizes(data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device]) -> tuple[int, int, int]:
    """Return the sizes of the learner's axes over these devices; `data` = -1 takes those that the others leave.

    Raises:
      UserError: the sizes do not multiply to the number of devices, the processes have different numbers of devices, or
        the devices of a process would not be a block of the mesh, or `fsdp` and `tensor` would span TPU slices.
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
    slices = collections.Counter(map(_slice_index, devices))
    if len(slices) > 1 and min(slices.values()) % (fsdp * tensor):
        raise UserError(
            f"mesh.fsdp x mesh.tensor is {fsdp} x {tensor}; it must divide the {min(slices.values())} devices of each "
            f"of the {len(slices)} slices: only mesh.data may cross the slow network between them"
        )
    return sizes[0], fsdp, tensor


def _by_process(devices: Sequence[jax.Device]) -> dict[int, list[jax.Device]]:
    """Return the devices of each process, in the order of slices, processes and their own."""
    indices = sorted({(_slice_index(d), d.process_index) for d in devices})
    return {index: [d for d in devices if d.process_index == index] for _, index in indices}


def _slice_index(device: jax.Device) -> int:
    """Return the number of the TPU slice of a device; 0 for other devices (on GPUs JAX numbers hosts so)."""
    return int(getattr(device, "slice_index", 0)) if getattr(device, "platform", "") == "tpu" else 0


def split_devices(devices: Sequence[jax.Device], rollout_devices: int) -> tuple[list[jax.Device], list[jax.Device]]:
    """Split the devices of all processes into those for learning and those for rollouts.

    The last `rollout_devices` of each process serve rollouts alone; 0 returns all devices twice. Raises UserError if a
    process has no more than that.
    """
    if not rollout_devices:
        return list(devices), list(devices)
    by_process = _by_process(devices).values()
    fewest = min(map(len, by_process))
    if not 0 < rollout_devices < fewest:
        raise UserError(
            f"mesh.rollout_devices is {rollout_devices}; it must leave some of the {fewest} devices of a process to "
            "the learner (0: all devices serve both)"
        )
    learning = [d for own in by_process for d in own[:-rollout_devices]]
    return learning, [d for own in by_process for d in own[-rollout_devices:]]


def rollout_mesh(devices: Mesh | Sequence[jax.Device], tensor: int = 1) -> Mesh:
    """Return the mesh of this process's engine: KV slots are sharded over `data`, heads over `tensor`.

    Args:
      devices: mesh or list with the devices of all processes.
      tensor: size of the axis `tensor`, which must divide the devices of a process (UserError).
    """
    every = list(devices.devices.flat) if isinstance(devices, Mesh) else devices
    return _engine_mesh(_by_process(every)[processes.process_index()], tensor)


def rollout_shards(devices: int, tensor: int) -> int:
    """Return the size of the data axis of a rollout mesh over the devices of a process, which `tensor` must divide."""
    if tensor < 1 or devices % tensor:
        raise UserError(f"rollout.tensor is {tensor}; it must divide the {devices} devices of a process")
    return devices // tensor


def _engine_mesh(own: Sequence[jax.Device], tensor: int) -> Mesh:
    return _make_mesh(own, (rollout_shards(len(own), tensor), 1, tensor))


def make_rollout_view(
    learner: Mesh,
    rollout: Mesh,
    shardings: Callable[[Any, Mesh], Any],
    prepare: Callable[..., Any],
    formats: Callable[[Any, Mesh], Any] | None = None,
) -> Callable[..., Any]:
    """Return a function that turns parameters on the learner's mesh into those of this process's engine.

    The parameters never pass through the hosts. They are resharded over the learner's devices with one more axis, one
    engine each, along which they are replicated; then each process takes its own shards as arrays of its engine. If the
    engine has devices of its own, the arrays are copied there.

    Args:
      learner, rollout: meshes of the learner and of this process's engine.
      shardings: function (tree, mesh) -> shardings of the tree's leaves.
      prepare: function of the parameters that the engine computes with, e.g. a cast to the compute dtype; the returned
        function has the same arguments.
      formats: `shardings`, of the result also with memory layouts; None: without.
    """
    formats = formats or shardings
    by_process = _by_process(list(learner.devices.flat))
    tensor = math.gcd(rollout.shape["tensor"], learner.size // len(by_process))
    every = {process: _engine_mesh(own, tensor) for process, own in by_process.items()}
    own_mesh = every[processes.process_index()]
    apart = set(own_mesh.devices.flat) != set(rollout.devices.flat)
    stacked = np.stack([mesh.devices for mesh in every.values()])
    everywhere = Mesh(stacked, ("engine", *AXES), axis_types=(AxisType.Auto,) * stacked.ndim)

    @functools.cache
    def reshard(structure: Any, avals: Sequence[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        # The compiler ignores a sharding constraint inside the program: some results come out replicated.
        result = jax.eval_shape(prepare, *jax.tree.unflatten(structure, avals))
        # Laid last: a copy to other devices takes the default layout for granted (JAX 0.10.2 on CPU mixes up numbers).
        lay = jax.jit(lambda params: params, out_shardings=formats(result, rollout), donate_argnums=0)
        return jax.jit(prepare, out_shardings=(shardings if apart else formats)(result, everywhere)), lay

    def view(*args: Any) -> Any:
        def own(x: jax.Array, sharding: NamedSharding) -> jax.Array:
            return jax.make_array_from_single_device_arrays(x.shape, sharding, [s.data for s in x.addressable_shards])

        leaves, structure = jax.tree.flatten(args)
        prepared, lay = reshard(structure, tuple(map(jax.typeof, leaves)))
        resharded = prepared(*args)
        local = jax.tree.map(own, resharded, shardings(resharded, own_mesh))
        return lay(jax.device_put(local, shardings(local, rollout))) if apart else local

    return view


def global_batch(batch: Any, mesh: Mesh) -> Any:
    """Join the rows of all processes, each [microbatches, rows, ...], to global arrays."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(NamedSharding(mesh, ROWS), x), batch)


def local_rows(x: jax.Array, mesh: Mesh) -> np.ndarray:
    """Return this process's rows of an array [microbatches, rows, ...] that is sharded like a batch."""
    return np.asarray(multihost_utils.global_array_to_host_local_array(x, mesh, ROWS))
