"""Compiled programs, kept from one start to the next: JAX's persistent cache, and what it leaves out.

JAX has process 0 alone write its cache, and the others find there only what has the same key for them. That holds for
all programs on GPUs and for those over devices of all processes on TPUs. It does not hold for what runs on a process's
own TPU devices, nor for anything on CPUs: each start would compile it again. `jit` keeps these programs for processes
other than 0, in the same folder.

Files of both kinds hold machine code: whoever can write the folder decides what the processes execute.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging
from etils import epath
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from agentr1_jax import files

LOAD_EVENT = "/agentr1_jax/kept/load_duration"
"""Seconds of each program that `jit` found; of those that JAX finds it tells itself."""
DAMAGED = re.compile(r"Error reading persistent compilation cache entry for '(\w+)'")

_folder: list[str] = []
"""Where this process keeps what JAX does not; empty where JAX keeps everything."""


def folder_of(setting: str, run_dir: str) -> str:
    """The folder that a setting names; `{runs}` in it is the folder that the run's folder lies in."""
    return os.path.expanduser(setting.replace("{runs}", str(epath.Path(run_dir).parent)))


def keep_in(folder: str) -> None:
    """Keeps all programs that are compiled from now on, small ones too, and finds those that were kept before.

    What is damaged there is compiled and written again. Of a folder that cannot be written is warned; it is read.

    Args:
      folder: made if need be; may lie in a bucket (`gs://...`).
    """
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        files.path(folder).mkdir(parents=True, exist_ok=True)
        if not files.is_remote(folder):
            tempfile.TemporaryFile(dir=folder).close()
    except Exception as error:  # Of a bucket: whatever its client raises.
        logging.warning("compiled programs cannot be kept in %s (%s); set compilation_cache", folder, error)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
        return
    if jax.process_index():
        _folder[:] = [folder]
    else:
        _mend(folder)


def _mend(folder: str) -> None:
    """Has a file of JAX's cache that cannot be read removed, since JAX leaves a file that is there as it is."""
    shown = warnings.showwarning

    def show(message: Any, *where: Any, **how: Any) -> None:
        shown(message, *where, **how)
        if found := DAMAGED.match(str(message)):
            for path in files.path(folder).glob(f"{found[1]}-*-cache"):  # JAX does not say which of them.
                path.unlink(missing_ok=True)

    warnings.showwarning = show


def jit(function: Callable[..., Any], mesh: Mesh | None, **options: Any) -> Callable[..., Any]:
    """`jax.jit`, whose compiled programs survive in every process once `keep_in` was called.

    Args:
      function: of positional arguments; none of them is static.
      mesh: of the devices that it runs on; None for this process's first device.
      options: of `jax.jit`.
    """
    jitted = jax.jit(function, **options)
    if not _folder:
        return jitted
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.devices.flat)
    kind, spread = devices[0].platform, len({device.process_index for device in devices}) > 1
    return jitted if kind == "gpu" or (kind == "tpu" and spread) else _Kept(jitted, devices, _folder[0])


class _Kept:
    """A jitted function that loads its compiled programs from a folder, or compiles them and leaves them there."""

    def __init__(self, jitted: Any, devices: Sequence[jax.Device], folder: str) -> None:
        self._jitted, self._devices, self._folder = jitted, devices, folder
        self._name = re.sub(r"\W", "_", getattr(jitted, "__name__", "program"))
        self._programs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        variant = tree, tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
        if variant not in self._programs:
            lowered = self._jitted.lower(*args)
            path = os.path.join(self._folder, f"{self._name}-{_key(lowered, self._devices)}-kept")
            self._programs[variant] = self._found(path, lowered) or self._made(path, lowered)
        return self._programs[variant](*args)

    def _found(self, path: str, lowered: jax.stages.Lowered) -> Callable[..., Any] | None:
        started = time.perf_counter()
        try:
            program = zlib.decompress(files.read_bytes(path))  # It has a checksum.
            found = serialize_executable.deserialize_and_load(
                program, lowered.in_tree, lowered.out_tree, execution_devices=self._devices
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # Whatever a file from elsewhere brings about.
            logging.warning("%s cannot be used (%s); %s is compiled again", path, error, self._name)
            return None
        jax.monitoring.record_event_duration_secs(LOAD_EVENT, time.perf_counter() - started)
        return found

    def _made(self, path: str, lowered: jax.stages.Lowered) -> Callable[..., Any]:
        made = lowered.compile()
        try:
            program, _, _ = serialize_executable.serialize(made)
            with files.published(path, "wb") as out:
                out.write(zlib.compress(program))
        except Exception as error:  # What cannot be kept can be run.
            logging.warning("%s is not kept in %s (%s)", self._name, self._folder, error)
        return made


def _key(lowered: jax.stages.Lowered, devices: Sequence[jax.Device]) -> str:
    """A hash of all that a compiled program depends on."""
    parts = [
        lowered.as_text(),
        jax.__version__,
        devices[0].client.platform_version,  # On TPUs that of libtpu.
        str(jax.process_index()),
        *(f"{device.id} {device.process_index} {device.device_kind}" for device in devices),
        *(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")),
        _instructions() if devices[0].platform == "cpu" else "",
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _instructions() -> str:
    """What this host's CPU is and can execute."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return platform.processor()
