"""Several processes as one run, the thread that enqueues programs, and huge pages."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from pair import run_two, start_two

from agentr1_jax.errors import UserError
from agentr1_jax.runtime import processes

CHILD = """
import os, signal
import numpy as np
from agentr1_jax.runtime import processes

processes.initialize()
index = processes.process_index()
assert processes.process_count() == 2
payload = bytes([index]) * (3000 * index)
assert processes.all_gather_bytes(payload) == [b"", bytes([1]) * 3000]
assert processes.all_gather_bytes(b"") == [b"", b""]
assert processes.all_gather_json(["é" * index, index]) == [["", 0], ["é", 1]]
first, second = processes.all_gather_arrays({"x": np.arange(index + 1), f"only{index}": np.float32([[index]])})
assert sorted(first) == ["only0", "x"] and sorted(second) == ["only1", "x"]
assert second["x"].tolist() == [0, 1] and second["x"].dtype == np.arange(1).dtype and second["only1"].shape == (1, 1)
processes.barrier()
with processes.StopRequest() as stop:
    assert not stop.requested_anywhere()
    if index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested_anywhere() and stop.requested == (index == 1)
import jax
assert (jax.local_device_count(), jax.device_count()) == (2, 4)
calls = []
def dispatch(program, *arguments):
    calls.append(program)
    return program(*arguments)
processes.use_for_exchange([jax.local_devices(process)[1] for process in (0, 1)], dispatch)
assert processes.all_gather_json([index]) == [[0], [1]] and len(calls) == 2
os.write(1, b"agreed")
"""


def test_two_processes_exchange_and_agree():
    for out in run_two(CHILD):
        assert out.endswith("agreed")


def test_one_process_needs_nobody():
    assert processes.all_gather_json((1, "a")) == [[1, "a"]]
    (arrays,) = processes.all_gather_arrays({"x": np.ones((2, 0), np.float16)})
    assert (arrays["x"].shape, arrays["x"].dtype) == ((2, 0), np.float16)
    assert processes.all_gather_flags(True) == [True]
    processes.barrier()
    with pytest.raises(ValueError, match="pickle"):
        processes.all_gather_arrays({"x": np.asarray([object()])})


def test_stop_request_notes_signals_and_restores_handlers():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with processes.StopRequest() as stop:
        assert not stop.requested_anywhere()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.requested_anywhere()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(
    ("address", "count", "index", "message"),
    [
        ("127.0.0.1:1", "2", "", "AGENTR1_PROCESS_ID is ''"),
        ("127.0.0.1:1", "two", "0", "AGENTR1_NUM_PROCESSES is 'two'"),
        ("127.0.0.1:1", "2", "2", "from 0 to 1"),
        ("localhost", "2", "1", "must be host:port"),
        ("free", "2", "1", r"no coordinator at 127\.0\.0\.1, port \d+, within 0\.5 s"),
    ],
)
def test_a_wrong_environment_is_named(monkeypatch, address, count, index, message):
    # Not a parameter: all workers of pytest-xdist must collect the same tests.
    monkeypatch.setenv("AGENTR1_COORDINATOR", free_address() if address == "free" else address)
    monkeypatch.setenv("AGENTR1_NUM_PROCESSES", count)
    monkeypatch.setenv("AGENTR1_PROCESS_ID", index)
    monkeypatch.delenv("AGENTR1_CPU_DEVICES", raising=False)
    with pytest.raises(UserError, match=message):
        processes.initialize(start_seconds=0.5)


LONELY = """
from agentr1_jax.runtime import config, processes

def main(argv):
    processes.initialize(heartbeat_seconds=4)
    print("joined", flush=True)
    while True:
        processes.all_gather_bytes(b"x" * 1000)

config.run_main(main)
"""


def test_a_process_that_outlives_another_one_ends_and_names_it():
    children = start_two(LONELY)
    try:
        for child in children:
            assert child.stdout.readline() == "joined\n"
        children[1].kill()
        _, said = children[0].communicate(timeout=60)
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert children[0].returncode != 0 and re.search(r"unhealthy .*:\s*1\s", said), said  # By JAX.


def test_coroutines_and_other_threads_get_the_same_thread():
    dispatcher = processes.Dispatcher()

    async def both():
        return await dispatcher(lambda: threading.current_thread().name), await dispatcher(threading.get_ident)

    name, first = asyncio.run(both())
    assert name.startswith("dispatch") and dispatcher.call(threading.get_ident) == first != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        dispatcher.call(lambda x: 1 // x, 0)


START_AGAIN = (
    "import os, sys; from agentr1_jax.runtime.processes import use_huge_pages; pid = os.environ.setdefault('PID', "
    "str(os.getpid())); print('start', flush=True); use_huge_pages(); "
    "print(os.environ['GLIBC_TUNABLES'], pid == str(os.getpid()), sys.argv[1:])"
)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's setting")
@pytest.mark.parametrize(("given", "starts"), [(None, 2), ("glibc.malloc.hugetlb=0", 1)])
def test_a_program_starts_again_once_with_huge_pages(given, starts):
    environment = {key: x for key, x in os.environ.items() if key != "GLIBC_TUNABLES"}
    environment |= {} if given is None else {"GLIBC_TUNABLES": given}
    command = [sys.executable, "-c", START_AGAIN, "--a=b c", "d"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    *lines, last = done.stdout.splitlines()
    assert lines == ["start"] * starts
    assert last == f"{given or 'glibc.malloc.hugetlb=1'} True ['--a=b c', 'd']"
