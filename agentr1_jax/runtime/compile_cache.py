"""Compile cache: compiled programs kept on disk from one start to the next.

JAX's persistent cache does most of the work, but only process 0 writes it, and the other processes find in it only
programs whose cache key is the same for them. That holds for all programs on GPUs, and on TPUs for programs that span
the devices of all processes. It does not hold for programs on one process's own TPU devices, nor for any program on
CPUs: those would be compiled again at every start. `cached_jit` keeps them for the processes other than 0, in the same
folder.

Files of both kinds hold machine code: whoever can write the folder decides what the processes execute.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import tempfile
import threading
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

LOAD_EVENT = "/agentr1_jax/compile_cache/load_duration"
"""Seconds that loading a program from our own files took."""
JAX_LOAD_EVENT = "/jax/compilation_cache/cache_retrieval_time_sec"
"""Seconds that loading a program from JAX's cache took; precedes `COMPILE_EVENT` in the same thread."""
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""Seconds until a program was compiled, or loaded from JAX's cache."""
DAMAGED = re.compile(r"Error reading persistent compilation cache entry for '(\w+)'")
"""JAX's warning about a file of its cache that it cannot read."""

_folder: list[str] = []
"""Folder of the programs that JAX's cache leaves out; empty in processes where JAX's cache suffices."""


def cache_folder(setting: str, run_dir: str) -> str:
    """Return the folder that `compilation_cache` names; `{runs}` in it stands for the parent of the run folder."""
    return os.path.expanduser(setting.replace("{runs}", str(epath.Path(run_dir).parent)))


def enable(folder: str) -> None:
    """Keep all programs compiled from now on in a folder (disk or bucket), and load those already there.

    A damaged file is removed and its program compiled again. A folder that cannot be written is reported by a warning;
    it is still read.
    """
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        files.path(folder).mkdir(parents=True, exist_ok=True)
        if not files.is_remote(folder):
            tempfile.TemporaryFile(dir=folder).close()
    except Exception as error:  # Bucket clients raise exceptions of their own.
        logging.warning("compiled programs cannot be kept in %s (%s); set compilation_cache", folder, error)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
        return
    if jax.process_index():
        _folder[:] = [folder]
    else:
        _remove_damaged_files(folder)


def _remove_damaged_files(folder: str) -> None:
    """Remove files of JAX's cache that JAX warns about; JAX itself never overwrites an existing file."""
    original = warnings.showwarning

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        original(message, *args, **kwargs)
        if match := DAMAGED.match(str(message)):
            for path in files.path(folder).glob(f"{match[1]}-*-cache"):  # The warning does not say which of them.
                path.unlink(missing_ok=True)

    warnings.showwarning = show


def cached_jit(function: Callable[..., Any], mesh: Mesh | None, **options: Any) -> Callable[..., Any]:
    """Return `jax.jit(function, **options)`, whose compiled programs every process keeps once `enable` was called.

    Args:
      function: function of positional arguments, none of them static.
      mesh: mesh of the devices that it runs on; None for this process's first device.
      options: options of `jax.jit`.
    """
    jitted = jax.jit(function, **options)
    if not _folder:
        return jitted
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.devices.flat)
    kind, several_processes = devices[0].platform, len({device.process_index for device in devices}) > 1
    in_jax_cache = kind == "gpu" or (kind == "tpu" and several_processes)
    return jitted if in_jax_cache else CachedFunction(jitted, devices, _folder[0])


class CachedFunction:
    """Jitted function that loads its compiled programs from a folder, or compiles them and writes them there."""

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


class CompileCounter:
    """Count of the programs that this process compiled or loaded since the counter was made.

    Attributes:
      count: number of programs, compiled or loaded from the compile cache.
      loaded: number of programs that were loaded from the compile cache.
      seconds: time that compiling the others took.
    """

    def __init__(self) -> None:
        self.count = self.loaded = 0
        self.seconds = 0.0
        self._thread = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def __str__(self) -> str:
        return f"{self.loaded} from the cache, {self.count - self.loaded} compiled in {self.seconds:.1f} s"

    def _record(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == JAX_LOAD_EVENT:
            self._thread.loaded = True
        elif event in (COMPILE_EVENT, LOAD_EVENT):
            loaded = event == LOAD_EVENT or getattr(self._thread, "loaded", False)
            self._thread.loaded = False
            self.count += 1
            self.loaded += loaded
            self.seconds += 0.0 if loaded else duration_secs
