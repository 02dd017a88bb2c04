"""The lock of a folder in a bucket: one owner, who renews it; taken over when he does not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime.lease import Lease
from agentr1_jax.runtime.lock import NAME, lock

OFTEN = {"renewal": 0.05, "expiry": 60.0}
"""Whoever waits for a sign of life of such an owner is refused soon."""


def test_a_second_run_is_refused_and_told_by_whom(bucket):
    path = os.path.join(bucket, NAME)
    with Lease(path, **OFTEN):
        assert f"process {os.getpid()} on ".encode() in files.read_bytes(path)
        with pytest.raises(UserError, match=rf"another run is at work there \(process {os.getpid()} on "):
            Lease(path, **OFTEN)
        with Lease(os.path.join(bucket, "other", NAME), **OFTEN):
            pass
    assert files.names(bucket) == []
    with lock(bucket) as again:
        assert isinstance(again, Lease) and files.names(bucket) == [NAME]
    assert files.names(bucket) == []


HOLDER = """
import sys, time
from agentr1_jax.runtime.lease import Lease
lease = Lease(sys.argv[1], renewal=0.1)
print("held", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def holder(path):
    """A process that holds a lease and renews it."""
    command = [sys.executable, "-c", HOLDER, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "held\n", child.communicate()
            yield child
        finally:
            child.kill()


def test_a_killed_owner_is_replaced_after_a_while(bucket):
    path = os.path.join(bucket, NAME)
    with holder(path) as child:
        with pytest.raises(UserError, match=f"process {child.pid} on "):
            Lease(path, renewal=60.0)
        child.send_signal(signal.SIGKILL)
        child.wait()
    with Lease(path, renewal=60.0, expiry=1.0):
        assert f"process {os.getpid()} on".encode() in files.read_bytes(path)


def test_an_owner_that_was_away_for_too_long_ends_and_writes_nothing_more(bucket):
    path = os.path.join(bucket, NAME)
    with holder(path) as child:
        child.send_signal(signal.SIGSTOP)
        with Lease(path, renewal=60.0, expiry=1.0):
            child.send_signal(signal.SIGCONT)
            _, said = child.communicate(timeout=100)
            assert child.returncode == UserError.status
            assert f"was not renewed in time and is process {os.getpid()} on" in said
            assert f"process {os.getpid()} on".encode() in files.read_bytes(path)


def test_an_attempt_whose_answer_was_lost_is_known_as_ones_own(bucket):
    """The library tries again, and is told that the object is of another generation: of its own first attempt."""
    with Lease(os.path.join(bucket, NAME), renewal=60.0) as lease:
        before = lease._generation
        assert lease._write(before) and lease._generation != before
        assert lease._write(before) and lease._write(lease._generation)


def test_a_bucket_that_is_not_there_is_said(bucket):
    with pytest.raises(
        UserError, match=r"gs://no-such-bucket/run/\.lock cannot be written .*see that the bucket exists"
    ):
        lock("gs://no-such-bucket/run")
