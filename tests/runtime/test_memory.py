"""Huge pages: a program starts again once, with its arguments, and never against a user's setting."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = (
    "import os, sys; from agentr1_jax.runtime.processes import use_huge_pages; pid = os.environ.setdefault('PID', "
    "str(os.getpid())); print('start', flush=True); use_huge_pages(); "
    "print(os.environ['GLIBC_TUNABLES'], pid == str(os.getpid()), sys.argv[1:])"
)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's setting")
@pytest.mark.parametrize(("given", "starts"), [(None, 2), ("glibc.malloc.hugetlb=0", 1)])
def test_a_program_starts_again_once_with_huge_pages(given, starts):
    environment = {key: x for key, x in os.environ.items() if key != "GLIBC_TUNABLES"}
    environment |= {} if given is None else {"GLIBC_TUNABLES": given}
    command = [sys.executable, "-c", PROGRAM, "--a=b c", "d"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    *lines, last = done.stdout.splitlines()
    assert lines == ["start"] * starts
    assert last == f"{given or 'glibc.malloc.hugetlb=1'} True ['--a=b c', 'd']"
