"""Several processes find each other at the address of process 0, which also tells them when one of them is lost."""

from __future__ import annotations

import os
import socket
import sys
import time

import jax
from absl import logging

from agentr1_jax.errors import RetryableError, UserError

LOST_PROCESS_SECONDS = 120
"""Longest wait for the name of a lost process; longer than a sensible `heartbeat_seconds`."""


def read_number(variable: str) -> int:
    """Return the whole number in an environment variable. Raises UserError if it holds none."""
    value = os.environ.get(variable, "")
    if not value.isdecimal():
        raise UserError(f"the environment variable {variable} is {value!r}; it must be a whole number")
    return int(value)


def join(address: str, start_seconds: int, heartbeat_seconds: int) -> None:
    """Join the processes of the run.

    Args:
      address: host:port of process 0.
      start_seconds, heartbeat_seconds: see `ProcessesConfig`.
    """
    count, index = read_number("AGENTR1_NUM_PROCESSES"), read_number("AGENTR1_PROCESS_ID")
    if not 0 <= index < count:
        raise UserError(f"AGENTR1_PROCESS_ID is {index}; of {count} processes it must be from 0 to {count - 1}")
    logging.info("process %d: joins %d processes at %s, waits %d s at most", index, count, address, start_seconds)
    if index:
        _wait_for_coordinator(address, start_seconds)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's own handler would swallow a SIGTERM that arrives before `StopRequest` is entered.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        address, count, index, initialization_timeout=start_seconds, heartbeat_timeout_seconds=heartbeat_seconds
    )


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


def wait_for_lost_process(error: BaseException) -> None:
    """After a collective failed because a process was lost, wait until the lost process is named.

    A lost process 0 is noticed here: its port does not answer. Any other lost process stops sending heartbeats to the
    coordination service in process 0, which names it after `heartbeat_seconds` and ends all others.
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
    time.sleep(LOST_PROCESS_SECONDS)
