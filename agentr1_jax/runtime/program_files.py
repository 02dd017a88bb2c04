"""Compiled programs in files, for the processes whose programs JAX's cache leaves out; see `compile_cache`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging
from jax.experimental import serialize_executable

from agentr1_jax import files

LOAD_EVENT = "/agentr1_jax/compile_cache/load_duration"
"""Seconds that loading a program from our own files took."""


class CachedFunction:
    """Jitted function that loads its compiled programs from a folder, or compiles them and writes them there.

    Args:
      jitted: function of positional arguments, as `jax.jit` returns it.
      devices: devices that it runs on.
      folder: folder of the programs.
    """

    def __init__(self, jitted: Any, devices: Sequence[jax.Device], folder: str) -> None:
        self._jitted, self._devices, self._folder = jitted, devices, folder
        self._name = re.sub(r"\W", "_", getattr(jitted, "__name__", "program"))
        self._programs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        signature = tree, tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
        if signature not in self._programs:
            lowered = self._jitted.lower(*args)
            path = os.path.join(self._folder, f"{self._name}-{_cache_key(lowered, self._devices)}-program")
            self._programs[signature] = self._load(path, lowered) or self._compile(path, lowered)
        return self._programs[signature](*args)

    def _load(self, path: str, lowered: jax.stages.Lowered) -> Callable[..., Any] | None:
        start = time.perf_counter()
        try:
            payload = zlib.decompress(files.read_bytes(path))  # zlib verifies a checksum.
            program = serialize_executable.deserialize_and_load(
                payload, lowered.in_tree, lowered.out_tree, execution_devices=self._devices
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # A damaged or foreign file can raise anything.
            logging.warning("%s cannot be used (%s); %s is compiled again", path, error, self._name)
            return None
        jax.monitoring.record_event_duration_secs(LOAD_EVENT, time.perf_counter() - start)
        return program

    def _compile(self, path: str, lowered: jax.stages.Lowered) -> Callable[..., Any]:
        program = lowered.compile()
        try:
            payload, _, _ = serialize_executable.serialize(program)
            with files.atomic_write(path, "wb") as out:
                out.write(zlib.compress(payload))
        except Exception as error:  # The program runs even if it cannot be kept.
            logging.warning("%s is not kept in %s (%s)", self._name, self._folder, error)
        return program


def _cache_key(lowered: jax.stages.Lowered, devices: Sequence[jax.Device]) -> str:
    """Return a hash of everything that a compiled program depends on."""
    parts = [
        lowered.as_text(),
        jax.__version__,
        devices[0].client.platform_version,  # On TPUs the version of libtpu.
        str(jax.process_index()),
        *(f"{device.id} {device.process_index} {device.device_kind}" for device in devices),
        *(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")),
        _cpu_features() if devices[0].platform == "cpu" else "",
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _cpu_features() -> str:
    """Return the model and the instruction sets of this host's CPU."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return platform.processor()
