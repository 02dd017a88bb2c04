"""TPU slices and GPUs to compile for: libtpu, or JAX's CUDA plugin, compiles for them on any machine."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from agentr1_jax.errors import UserError

# libtpu reads these variables while it loads; without them, off a TPU, it would wait for a metadata server. The first
# one turns off the lock on the chips of a machine, which compiling does not need.
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}

# Of https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs, h100_sxm and h200: memory (bytes,
# bytes/s), and what both share.
GPUS = {"h100": (84942979072, 3352320000000), "h200": (151397597184, 4800000000000)}
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  cuda_compute_capability {{ major: 9 }}
  device_memory_size: {memory} memory_bandwidth: {bandwidth}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA {name}"
"""


def devices(name: str) -> list[jax.Device]:
    """Return devices to compile for, and not to run on: of TPU slices such as `v5e:4x4`, or GPUs such as `h200:8`.

    Args:
      name: generation and chips along each axis: two for v5e and v6e, three for v4 and v5p; `2*v5e:4x4` is two slices.
        Of GPUs the number in one host; `h200` is one.

    Raises:
      UserError: the compiler is missing or does not know the name.
    """
    if name.partition(":")[0] in GPUS:
        return _gpus(name)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "--topology needs libtpu, which compiles for TPUs on any machine: "
            f"pip install 'jax[tpu]=={jax.__version__}'"
        )
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    with contextlib.suppress(RuntimeError):  # After the first use of a device it cannot be set any more.
        jax.config.update("jax_platforms", "cpu")
    count, _, one = name.rpartition("*")
    several = {"num_slices": int(count)} if count.isdecimal() and int(count) > 1 else {}
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=one, **several).devices)
    except Exception as error:  # jax.errors.JaxRuntimeError, or what libtpu raises while it loads.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--topology={name}: {reason}; examples: v5e:4x4, v6e:4x4, v5p:2x2x2, 2*v5e:4x4, h200:8"
        ) from error


def _gpus(name: str) -> list[jax.Device]:
    kind, _, count = name.partition(":")
    if count and not (count.isdecimal() and int(count)):
        raise UserError(f"--topology={name}: write the number of GPUs, e.g. {kind}:8")
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        raise UserError(
            f"--topology={name} needs JAX's CUDA compiler, which runs on any machine: pip install --no-deps "
            f"jax-cuda13-pjrt=={jax.__version__} jax-cuda13-plugin=={jax.__version__}"
        )
    with contextlib.suppress(RuntimeError):  # After the first use of a device it cannot be set any more.
        jax.config.update("jax_platforms", "cpu")
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # Its fused attention asks the GPU that is here, and its cuDNN, what they can do.
    cudnn.check_cudnn_version = lambda: 91000
    cudnn.check_compute_capability = lambda least: float(least) <= 9.0
    cudnn.is_cuda_compute_capability_equal = lambda other: float(other) == 9.0
    memory, bandwidth = GPUS[kind]
    target = TARGET.format(memory=memory, bandwidth=bandwidth, name=kind.upper())
    grid = f"1 x 1 x {count or 1}"
    return list(topologies.get_topology_desc("", platform="cuda", target_config=target, topology=grid).devices)


def first_host(name: str, slice_devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Return the devices of the first process of a slice, as a slice of their own.

    Off a TPU libtpu refuses programs for devices whose ids have gaps, as those of a process may have in a larger slice
    (of v5e:4x4 the first host has 0, 1, 4, 5).

    Args:
      name: the slice.
      slice_devices: its devices.
    """
    own = [d for d in slice_devices if d.process_index == 0]
    if len(own) == len(slice_devices):
        return list(slice_devices)
    generation, _, chips = name.rpartition("*")[2].partition(":")
    extents = [len({d.coords[axis] for d in own}) for axis in range(len(chips.split("x")))]
    return devices(f"{generation}:{'x'.join(map(str, extents))}")


@contextlib.contextmanager
def no_compile_cache() -> Iterator[None]:
    """Compile without the compile cache while this context lasts: loading a program needs the devices of the slice."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # It decides at the first compilation whether it is used.
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
