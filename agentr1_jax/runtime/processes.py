"""Several processes as one run: start, exchange of host data, a common stop; and the thread that enqueues programs.

The scripts of `launch/` describe the processes by environment variables: `AGENTR1_COORDINATOR` (host:port),
`AGENTR1_NUM_PROCESSES`, `AGENTR1_PROCESS_ID`, and on CPUs `AGENTR1_CPU_DEVICES` (devices of each process).
Every function that exchanges data is collective: all processes call it, in the same order.

`multihost_utils.process_allgather` does less than the exchange here: it runs over all devices, also those that an
engine uses in another thread, and its program is compiled again at every start in all processes but the first.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
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
from typing import Any, TypeVar

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pydantic.dataclasses import dataclass

from agentr1_jax.errors import RetryableError, UserError
from agentr1_jax.runtime.compile_cache import cached_jit
from agentr1_jax.validation import STRICT, Count

T = TypeVar("T")

HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Value of GLIBC_TUNABLES by which the C library allocates large arrays in huge pages."""


@dataclass(frozen=True, config=STRICT)
class ProcessesConfig:
    """Limits of several processes that run together: section `processes` of a config.

    Attributes:
      start_seconds: time in which all processes must have started, in seconds.
      heartbeat_seconds: a process that is silent for so long counts as lost, and the others end, in seconds.
    """

    start_seconds: Count = 300
    heartbeat_seconds: Count = 30


def use_huge_pages() -> None:
    """Start this program again with huge pages for its large arrays, unless GLIBC_TUNABLES is set.

    XLA's CPU backend frees temporary arrays after every call, and the kernel hands new ones out page by page, each
    zeroed: for an update with 900 MB of them that takes a fifth of its time in pages of 4 KiB, and next to nothing in
    pages of 2 MiB. The C library (glibc 2.35 and later) reads the setting only at the start of a program.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or sys.gettrace() is not None:
        return
    os.environ["GLIBC_TUNABLES"] = HUGE_PAGES
    os.execv(sys.executable, sys.orig_argv)


def initialize(start_seconds: float = 300, heartbeat_seconds: int = 30) -> None:
    """Join the processes that the environment describes; call it before anything else touches JAX's devices.

    The arguments are those of `ProcessesConfig`.

    Raises:
      UserError: the environment variables are incomplete or not numbers.
      RetryableError: no process answers at the coordinator's address.
    """
    if os.environ.get("AGENTR1_CPU_DEVICES"):
        jax.config.update("jax_num_cpu_devices", _read_number("AGENTR1_CPU_DEVICES"))
    if address := os.environ.get("AGENTR1_COORDINATOR"):
        count, index = _read_number("AGENTR1_NUM_PROCESSES"), _read_number("AGENTR1_PROCESS_ID")
        if index >= count:
            raise UserError(f"AGENTR1_PROCESS_ID is {index}; of {count} processes it must be from 0 to {count - 1}")
        logging.info("process %d: joins %d processes at %s, waits %d s at most", index, count, address, start_seconds)
        if index:
            _wait_for_coordinator(address, start_seconds)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # JAX's own handler would swallow a SIGTERM that arrives before `StopRequest` is entered.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            *(address, count, index),
            initialization_timeout=int(start_seconds),
            heartbeat_timeout_seconds=heartbeat_seconds,
        )
    logging.info(
        "process %d of %d: devices %s of %d",
        *(jax.process_index(), jax.process_count(), [device.id for device in jax.local_devices()], jax.device_count()),
    )


def _read_number(variable: str) -> int:
    value = os.environ.get(variable, "")
    if not value.isdecimal():
        raise UserError(f"the environment variable {variable} is {value!r}; it must be a whole number")
    return int(value)


def _wait_for_coordinator(address: str, seconds: float) -> None:
    """Wait until process 0 listens; JAX's own wait ends in an abort that names no address."""
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
                raise RetryableError(
                    f"no coordinator at {host}, port {port}, within {seconds:g} s ({error}): process 0 must run there, "
                    "and the port must be open to the others; see AGENTR1_COORDINATOR and processes.start_seconds"
                ) from error
        time.sleep(0.2)


def process_index() -> int:
    """Return the number of this process, from 0."""
    return jax.process_index()


def process_count() -> int:
    """Return the number of processes of the run."""
    return jax.process_count()


class Dispatcher:
    """One thread that enqueues device programs, between two cycles of the engine that it belongs to.

    A device runs programs in the order in which they were enqueued, and a program over several devices waits for all of
    them. Two threads could enqueue two such programs in different orders on two devices, and both would wait for ever.
    So while an engine rolls out, all other code enqueues its programs on this thread. Enqueueing is quick; callers wait
    for results in their own threads.
    """

    def __init__(self) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="dispatch")

    async def __call__(self, function: Callable[[], T]) -> T:
        """Run a function on the thread, from a coroutine. The engine's cycles wait for it, so it should be short."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def call(self, program: Callable[..., T], *arguments: Any) -> T:
        """Call a program on the thread, from another thread."""
        return self._executor.submit(program, *arguments).result()


def call(program: Callable[..., T], *arguments: Any) -> T:
    """Call a compiled program from this thread."""
    return program(*arguments)


@dataclasses.dataclass
class _Exchange:
    """Devices that exchange data (all if empty), and how the program is called."""

    devices: Sequence[jax.Device] = ()
    dispatch: Callable[..., Any] = call


_exchange = _Exchange()


def use_for_exchange(devices: Sequence[jax.Device], dispatch: Callable[..., Any] = call) -> None:
    """Exchange data in another way from now on.

    Args:
      devices: at least one device of each process. Devices that serve rollouts alone do not belong to them, so that no
        rollout waits for another process.
      dispatch: calls the program that exchanges, (program, *arguments) -> its result; see `Setup.dispatch`.
    """
    _exchange.devices, _exchange.dispatch = list(devices), dispatch
    _exchange_program.cache_clear()


@functools.cache
def _exchange_program() -> tuple[Mesh, Callable[[jax.Array], jax.Array]]:
    """Return a mesh [process, device] and a program that copies an array sharded over it to every device."""
    devices = sorted(_exchange.devices or jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices).reshape(jax.process_count(), -1), ("process", "device"))
    return mesh, cached_jit(lambda x: x, mesh, out_shardings=NamedSharding(mesh, P()))


def _gather(x: np.ndarray) -> np.ndarray:
    """Gather one array of each process into [processes, ...]; shapes and dtypes must agree."""
    mesh, replicate = _exchange_program()
    rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("process")), x[None])
    return np.asarray(_exchange.dispatch(replicate, rows).addressable_data(0))


def barrier() -> None:
    """Wait until every process has called this."""
    all_gather_flags(True)


def all_gather_flags(flag: bool) -> list[bool]:
    """Gather one flag of each process, in order of process index."""
    return [flag] if jax.process_count() == 1 else _gather(np.asarray(flag)).tolist()


def all_gather_bytes(payload: bytes) -> list[bytes]:
    """Gather one payload of each process, in order of process index; each has up to 2 GiB."""
    if jax.process_count() == 1:
        return [payload]
    lengths = _gather(np.asarray(len(payload), np.int32))
    # Padding to a power of two lets payloads of many lengths share few compiled programs.
    padded = np.zeros(1 << max(10, int(lengths.max() - 1).bit_length()), np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    return [row[:length].tobytes() for row, length in zip(_gather(padded), lengths, strict=True)]


def all_gather_json(value: Any) -> list[Any]:
    """Gather one JSON value of each process, in order of process index; tuples come back as lists."""
    return [json.loads(text) for text in all_gather_bytes(json.dumps(value).encode())]


def all_gather_arrays(arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Gather the named arrays of each process; names, shapes and dtypes may differ between processes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    gathered = []
    for payload in all_gather_bytes(buffer.getvalue()):
        with np.load(io.BytesIO(payload), allow_pickle=False) as stored:
            gathered.append({name: stored[name] for name in stored.files})
    return gathered


class StopRequest:
    """Flag that SIGTERM and SIGINT set and the training loop reads, so that a run saves before it leaves.

    A second SIGINT raises KeyboardInterrupt. Enter this context after `initialize`, in the main thread.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0
        self._previous: dict[int, Any] = {}

    def requested_anywhere(self) -> bool:
        """Return True if any process was asked to stop; all processes get the same answer. Collective."""
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
