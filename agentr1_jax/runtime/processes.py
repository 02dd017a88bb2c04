"""Several processes as one run: set-up, exchange of host data, an agreed end.

The scripts of `launch/` describe the processes in the environment: `AGENTR1_COORDINATOR` (host:port),
`AGENTR1_NUM_PROCESSES`, `AGENTR1_PROCESS_ID`, and on CPUs `AGENTR1_CPU_DEVICES` (devices of each process).
Every function that exchanges something is collective: all processes call it, in the same order.
"""

from __future__ import annotations

import functools
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentr1_jax import kept
from agentr1_jax.errors import PassingError, UserError
from agentr1_jax.runtime.dispatch import enqueue

VERDICT_SECONDS = 120
"""Most time to wait for the name of a lost process; longer than a sensible `heartbeat_seconds`."""


def initialize(start_seconds: int = 300, heartbeat_seconds: int = 30) -> None:
    """Joins the processes that the environment describes; call it before anything else touches JAX's devices.

    Args:
      start_seconds: to wait for all of them; then this process ends.
      heartbeat_seconds: a process that was silent for so long counts as lost, and the others end.

    Raises:
      UserError: the variables are incomplete or not numbers.
      PassingError: nobody answers at the coordinator's address.
    """
    if os.environ.get("AGENTR1_CPU_DEVICES"):
        jax.config.update("jax_num_cpu_devices", _number("AGENTR1_CPU_DEVICES"))
    coordinator = os.environ.get("AGENTR1_COORDINATOR")
    if coordinator:
        count, index = _number("AGENTR1_NUM_PROCESSES"), _number("AGENTR1_PROCESS_ID")
        if not 0 <= index < count:
            raise UserError(f"AGENTR1_PROCESS_ID is {index}; of {count} processes it must be from 0 to {count - 1}")
        logging.info(
            "process %d: joins %d processes at %s, waits %d s at most", index, count, coordinator, start_seconds
        )
        if index:
            _await_coordinator(coordinator, start_seconds)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # JAX's own handler would swallow a SIGTERM that comes before `StopRequest` is entered.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            coordinator,
            count,
            index,
            initialization_timeout=start_seconds,
            heartbeat_timeout_seconds=heartbeat_seconds,
        )
    logging.info(
        "process %d of %d: devices %s of %d",
        *(jax.process_index(), jax.process_count(), [device.id for device in jax.local_devices()], jax.device_count()),
    )


def _await_coordinator(address: str, seconds: float) -> None:
    """Waits until process 0 listens; JAX's own wait ends in an abort that names no address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"AGENTR1_COORDINATOR is {address!r}; it must be host:port")
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=max(deadline - time.monotonic(), 0.1)).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise PassingError(
                    f"no coordinator at {host}, port {port}, within {seconds:g} s ({error}): process 0 must run there, "
                    "and the port must be open to the others; see AGENTR1_COORDINATOR and processes.start_seconds"
                ) from error
        time.sleep(0.2)


def await_verdict(error: BaseException) -> None:
    """Where a collective failed since another process was lost, waits until it is known which one.

    Process 0 is asked for itself. Of another one the coordination service, which process 0 runs, hears no more: after
    `heartbeat_seconds` that service names it and ends all others.
    """
    coordinator = os.environ.get("AGENTR1_COORDINATOR")
    if not coordinator or "gloo" not in str(error).lower() or not jax.distributed.is_initialized():
        return
    host, _, port = coordinator.rpartition(":")
    if jax.process_index():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError:
            sys.stderr.write(f"error: process 0 is lost: nobody answers at {coordinator}\n")
            return
    sys.stderr.write("error: a process was lost in a collective; waiting to hear which\n")
    sys.stderr.flush()
    time.sleep(VERDICT_SECONDS)


def process_index() -> int:
    """This process's number, from 0."""
    return jax.process_index()


def process_count() -> int:
    """Number of processes of the run."""
    return jax.process_count()


def exchange_over(devices: Sequence[jax.Device]) -> None:
    """Exchanges data over these devices from now on, at least one of each process; at first over all there are.

    Where some devices are for rollouts alone, it is the others, so that no rollout waits for another process.
    """
    _exchange.cache_clear()
    _devices[:] = devices


_devices: list[jax.Device] = []


@functools.cache
def _exchange() -> tuple[Mesh, Callable[[jax.Array], jax.Array]]:
    """A mesh with one row of devices for each process, and the program that gives every device all rows of an array."""
    devices = sorted(_devices or jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices).reshape(jax.process_count(), -1), ("process", "device"))
    return mesh, kept.jit(lambda x: x, mesh, out_shardings=NamedSharding(mesh, P()))


def _gather(x: np.ndarray) -> np.ndarray:
    """Every process's array, [processes, ...]; shapes and dtypes must agree."""
    mesh, everywhere = _exchange()
    rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("process")), x[None])
    return np.asarray(enqueue(everywhere, rows).addressable_data(0))


def barrier() -> None:
    """Waits until every process is here."""
    all_gather_flags(True)


def all_gather_bytes(payload: bytes) -> list[bytes]:
    """Every process's payload, in order of process index. Up to 2 GiB each."""
    if jax.process_count() == 1:
        return [payload]
    lengths = _gather(np.asarray(len(payload), np.int32))
    # A power of two, so that payloads of many lengths share few compiled programs.
    padded = np.zeros(1 << max(10, int(lengths.max() - 1).bit_length()), np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    return [row[:length].tobytes() for row, length in zip(_gather(padded), lengths, strict=True)]


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
    return _gather(np.asarray(flag)).tolist()


def _number(variable: str) -> int:
    value = os.environ.get(variable, "")
    if not value.isdecimal():
        raise UserError(f"the environment variable {variable} is {value!r}; it must be a whole number")
    return int(value)
