"""Programs of several processes, joined over the loopback; mostly two of two CPU devices each."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

TESTS = pathlib.Path(__file__).resolve().parent


def run_two(program: str, *arguments: str) -> list[str]:
    """What two processes of two devices print; both must end well."""
    return run(2, 2, program, *arguments)


def start_two(program: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """Two processes of two devices that find each other."""
    return start(2, 2, program, *arguments)


def run(processes: int, devices: int, program: str, *arguments: str) -> list[str]:
    """What so many processes of a program print, each with so many devices; all must end well."""
    children = start(processes, devices, program, *arguments)
    try:
        outputs = [child.communicate(timeout=600) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (_, err) in zip(children, outputs, strict=True):
        assert child.returncode == 0, err
    return [out for out, _ in outputs]


def start(processes: int, devices: int, program: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """The processes of a program, which find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            map(str, [TESTS.parent, TESTS, *sorted(path for path in TESTS.iterdir() if path.is_dir())])
        ),
        "JAX_PLATFORMS": "cpu",
        "AGENTR1_CPU_DEVICES": str(devices),
    }
    if processes > 1:
        environment |= {"AGENTR1_COORDINATOR": f"127.0.0.1:{port}", "AGENTR1_NUM_PROCESSES": str(processes)}
    command = [sys.executable, "-c", program, *arguments]
    return [
        subprocess.Popen(
            command,
            env=environment | {"AGENTR1_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]
