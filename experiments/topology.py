"""TPU slices to compile for: libtpu describes them and compiles for them on any machine."""

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


def devices(name: str) -> list[jax.Device]:
    """Return the devices of a TPU slice such as `v5e:4x4`, or of several, which can be compiled for and not run on.

    Args:
      name: generation and chips along each axis: two for v5e and v6e, three for v4 and v5p; `2*v5e:4x4` is two slices.

    Raises:
      UserError: libtpu is missing or does not know the slice.
    """
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
        raise UserError(f"--topology={name}: {reason}; examples: v5e:4x4, v6e:4x4, v5p:2x2x2, 2*v5e:4x4") from error


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
