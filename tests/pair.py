"""Two processes of two CPU devices each, joined over the loopback."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

TESTS = pathlib.Path(__file__).resolve().parent


def run_two(program: str, *arguments: str) -> list[str]:
    """What two processes of a program print; both must end well."""
    children = start_two(program, *arguments)
    try:
        outputs = [child.communicate(timeout=200) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (_, err) in zip(children, outputs, strict=True):
        assert child.returncode == 0, err
    return [out for out, _ in outputs]


def start_two(program: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """Two processes of a program that find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        "JAX_PLATFORMS": "cpu",
        "AGENTR1_COORDINATOR": f"127.0.0.1:{port}",
        "AGENTR1_NUM_PROCESSES": "2",
        "AGENTR1_CPU_DEVICES": "2",
    }
    command = [sys.executable, "-c", program, *arguments]
    return [
        subprocess.Popen(
            command,
            env=environment | {"AGENTR1_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
