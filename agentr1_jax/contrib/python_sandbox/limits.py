"""Limits of one call of the python tool."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from agentr1_jax.validation import STRICT, Count, Positive

MIB = 1 << 20


@dataclass(frozen=True, config=STRICT)
class SandboxLimits:
    """Limits of one call.

    Attributes:
      seconds: time limit from the start of the code; the start of the sandbox does not count.
      memory_mib: address space of each process, and memory of all processes of the call together, in MiB.
      processes: processes and threads at once.
      output_bytes: bytes of standard output and standard error together.
      folder_mib: size of /tmp and of /dev/shm, each of which is memory, too, in MiB.
      file_mib: size of the largest file, in MiB.
    """

    seconds: Positive = 10.0
    memory_mib: Count = 1024
    processes: Count = 32
    output_bytes: Count = 16_384
    folder_mib: Count = 64
    file_mib: Count = 64
