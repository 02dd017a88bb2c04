"""What one call of the python tool may take."""

from __future__ import annotations

import dataclasses
import math

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
    """Limits of one call.

    Attributes:
      seconds: from the start of the code; starting the sandbox does not count.
      memory_mib: address space of each process, and resident memory of all of them together.
      processes: processes and threads at once.
      output_bytes: of standard output and error together.
      folder_mib: size of the temporary folder, which is memory, too.
      file_mib: largest file.

    Raises:
      ValueError: a value makes no sense; the message names it.
    """

    seconds: float = 10.0
    memory_mib: int = 1024
    processes: int = 32
    output_bytes: int = 16_384
    folder_mib: int = 64
    file_mib: int = 64

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            whole = isinstance(field.default, int)
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ValueError(f"{field.name} is {value!r}; it must be {'an integer' if whole else 'a number'}")
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name} is {value}; it must be finite and above 0")
