"""Compile cache: compiled programs kept on disk from one start to the next.

JAX's persistent cache does most of the work, but only process 0 writes it, and the other processes find in it only
programs whose cache key is the same for them. That holds for all programs on GPUs, and on TPUs for programs that span
the devices of all processes. It does not hold for programs on one process's own TPU devices, nor for any program on
CPUs: those would be compiled again at every start. `cached_jit` keeps them for the processes other than 0, in the same
folder.

Files of both kinds hold machine code: whoever can write the folder decides what the processes execute.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
from absl import logging
from etils import epath
from jax.sharding import Mesh

from agentr1_jax import files
from agentr1_jax.runtime.program_files import LOAD_EVENT, CachedFunction

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
    """Keep all programs compiled from now on in a folder, small ones too, and load those already there.

    A damaged file is removed and its program compiled again. A folder that cannot be written is reported by a warning;
    it is still read.

    Args:
      folder: folder of the cache, made if need be; may lie in a bucket (`gs://...`).
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
