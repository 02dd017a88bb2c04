"""Several processes as one run: set-up, exchange of host data, an agreed end.

`launch/local.sh` describes the processes in the environment: `AGENTR1_COORDINATOR` (host:port),
`AGENTR1_NUM_PROCESSES`, `AGENTR1_PROCESS_ID` and `AGENTR1_CPU_DEVICES` (CPU devices of each process).
Every function that exchanges something is collective: all processes call it, in the same order.
"""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Mapping
from types import FrameType
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from agentr1_jax.runtime.errors import UserError


def initialize() -> None:
    """Joins the processes that the environment describes; call it before anything else touches JAX's devices.

    Raises:
      UserError: the variables are incomplete or not numbers.
    """
    if os.environ.get("AGENTR1_CPU_DEVICES"):
        jax.config.update("jax_num_cpu_devices", _number("AGENTR1_CPU_DEVICES"))
    coordinator = os.environ.get("AGENTR1_COORDINATOR")
    if coordinator:
        count, index = _number("AGENTR1_NUM_PROCESSES"), _number("AGENTR1_PROCESS_ID")
        if not 0 <= index < count:
            raise UserError(f"AGENTR1_PROCESS_ID is {index}; of {count} processes it must be from 0 to {count - 1}")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # JAX's own handler would swallow a SIGTERM that comes before `StopRequest` is entered.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(coordinator, count, index, initialization_timeout=60, heartbeat_timeout_seconds=100)
    logging.info(
        "process %d of %d: devices %s of %d",
        *(jax.process_index(), jax.process_count(), [device.id for device in jax.local_devices()], jax.device_count()),
    )


def process_index() -> int:
    """This process's number, from 0."""
    return jax.process_index()


def process_count() -> int:
    """Number of processes of the run."""
    return jax.process_count()


def barrier(name: str) -> None:
    """Waits until every process is here; `name` must agree."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def all_gather_bytes(payload: bytes) -> list[bytes]:
    """Every process's payload, in order of process index. Up to 2 GiB each."""
    if jax.process_count() == 1:
        return [payload]
    lengths = np.asarray(multihost_utils.process_allgather(np.asarray(len(payload), np.int32))).reshape(-1)
    # A power of two, so that payloads of many lengths share few compiled programs.
    padded = np.zeros(1 << max(10, int(lengths.max() - 1).bit_length()), np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(lengths), -1)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def all_gather_json(value: Any) -> list[Any]:
    """Every process's value, which must be JSON; tuples come back as lists."""
    return [json.loads(text) for text in all_gather_bytes(json.dumps(value).encode())]


def all_gather_arrays(arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Every process's named arrays; shapes, dtypes and names may differ between processes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    gathered = []
    for payload in all_gather_bytes(buffer.getvalue()):
        with np.load(io.BytesIO(payload), allow_pickle=False) as stored:
            gathered.append({name: stored[name] for name in stored.files})
    return gathered


class StopRequest:
    """Turns SIGTERM and SIGINT into a flag that the main loop looks at, so that a run saves before it leaves.

    A second SIGINT raises KeyboardInterrupt. Enter it after `initialize`, in the main thread.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0
        self._previous: dict[int, Any] = {}

    def agreed(self) -> bool:
        """Whether any process was asked to stop; all processes get the same answer. Collective."""
        return any(all_gather_flags(self.requested))

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt


def all_gather_flags(flag: bool) -> list[bool]:
    """Every process's flag, by one tiny collective; without any if there is one process."""
    if jax.process_count() == 1:
        return [flag]
    return [bool(x) for x in np.asarray(multihost_utils.process_allgather(np.asarray(flag))).reshape(-1)]


def _number(variable: str) -> int:
    value = os.environ.get(variable, "")
    if not value.isdecimal():
        raise UserError(f"the environment variable {variable} is {value!r}; it must be a whole number")
    return int(value)
