import re
import signal
import socket

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


def test_two_processes_exchange_and_agree() -> None:
    for out in run_two(CHILD):
        assert out.endswith("agreed")


def test_one_process_needs_nobody() -> None:
    assert processes.all_gather_bytes(b"x") == [b"x"]
    assert processes.all_gather_json((1, "a")) == [[1, "a"]]
    (arrays,) = processes.all_gather_arrays({"x": np.ones((2, 0), np.float16)})
    assert (arrays["x"].shape, arrays["x"].dtype) == ((2, 0), np.float16)
    assert processes.all_gather_flags(True) == [True]
    processes.barrier()


def test_objects_are_never_pickled() -> None:
    with pytest.raises(ValueError, match="pickle"):
        processes.all_gather_arrays({"x": np.asarray([object()])})


def test_stop_request_notes_signals_and_restores_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with processes.StopRequest() as stop:
        assert not stop.requested_anywhere()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        assert stop.requested_anywhere()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"AGENTR1_NUM_PROCESSES": "2"}, "AGENTR1_PROCESS_ID is ''"),
        ({"AGENTR1_NUM_PROCESSES": "two", "AGENTR1_PROCESS_ID": "0"}, "AGENTR1_NUM_PROCESSES is 'two'"),
        ({"AGENTR1_NUM_PROCESSES": "2", "AGENTR1_PROCESS_ID": "2"}, "from 0 to 1"),
    ],
)
def test_incomplete_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name in ("AGENTR1_NUM_PROCESSES", "AGENTR1_PROCESS_ID", "AGENTR1_CPU_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"AGENTR1_COORDINATOR": "127.0.0.1:1"} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        processes.initialize()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize(
    ("address", "message"), [("", ""), ("localhost", "must be host:port"), ("h:x", "must be host:port")]
)
def test_a_coordinator_that_does_not_answer_is_named(monkeypatch, address, message):
    port = free_port()
    monkeypatch.setenv("AGENTR1_COORDINATOR", address or f"127.0.0.1:{port}")
    monkeypatch.setenv("AGENTR1_NUM_PROCESSES", "2")
    monkeypatch.setenv("AGENTR1_PROCESS_ID", "1")
    monkeypatch.delenv("AGENTR1_CPU_DEVICES", raising=False)
    with pytest.raises(UserError, match=message or rf"no coordinator at 127\.0\.0\.1, port {port}, within 0\.5 s"):
        processes.initialize(start_seconds=0.5)


LONELY = """
import sys
from absl import app
from agentr1_jax.runtime import config, processes

def main(argv):
    processes.initialize(heartbeat_seconds=10)
    print("joined", flush=True)
    while True:
        processes.all_gather_bytes(b"x" * 1000)

config.run_main(main)
"""


@pytest.mark.parametrize("lost", [0, 1])
def test_who_outlives_another_process_ends_and_names_it(lost):
    children = start_two(LONELY)
    try:
        for child in children:
            assert child.stdout.readline() == "joined\n"
        children[lost].kill()
        _, said = children[1 - lost].communicate(timeout=60)
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert children[1 - lost].returncode != 0
    # JAX, which ends a process at once where its leader is gone, may be quicker than we.
    named = (
        r"process 0 is lost: nobody answers at 127\.0\.0\.1:|leader task was" if lost == 0 else r"unhealthy .*:\s*1\s"
    )
    assert re.search(named, said), said
