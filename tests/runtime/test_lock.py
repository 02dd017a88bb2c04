"""Lock of a run folder on a disk and in a bucket."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import filelock
import pytest

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime.lock import NAME, lock_folder

HOLDER = """
import sys, time
from agentr1_jax.runtime.lock import lock_folder
with lock_folder(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=["disk", "bucket"])
def folder(request, tmp_path):
    return str(tmp_path / "run") if request.param == "disk" else f"{request.getfixturevalue('bucket')}/run"


def test_a_second_run_is_refused_and_the_owner_is_named(folder):
    with lock_folder(folder):
        with pytest.raises(UserError, match=rf"another run is at work there \(process {os.getpid()} on "):
            lock_folder(folder).__enter__()
        with lock_folder(f"{folder}2"):
            pass
    assert not files.exists(folder) and not files.exists(f"{folder}2")
    with lock_folder(folder), files.atomic_write(os.path.join(folder, "config.json")):
        pass
    assert files.list_names(folder) == ["config.json"]


def test_an_owner_that_was_killed_leaves_the_folder_free_on_its_host(folder):
    with subprocess.Popen([sys.executable, "-c", HOLDER, folder], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {holder.pid} on "):
            lock_folder(folder).__enter__()
        holder.send_signal(signal.SIGKILL)
    assert files.list_names(folder) == [NAME]
    with lock_folder(folder):
        pass
    assert not files.exists(folder)


def test_a_file_without_an_owner_is_locked_too(tmp_path):
    with lock_folder(tmp_path):
        (tmp_path / NAME).write_text("")
        with pytest.raises(UserError, match="has not written its name"):
            lock_folder(tmp_path).__enter__()


def test_a_run_whose_folder_was_replaced_leaves_the_lock_of_the_next_alone(tmp_path):
    first, second = lock_folder(tmp_path / "run"), lock_folder(tmp_path / "run")
    first.__enter__()
    shutil.rmtree(tmp_path / "run")
    second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(UserError, match="another run is at work"):
        lock_folder(tmp_path / "run").__enter__()
    second.__exit__(None, None, None)


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def refuse(*_args, **_kwargs):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with lock_folder(tmp_path):
        assert "this file system has no locks" in caplog.text


def write_marker(bucket, **changes):
    marker = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "time": 0.0,
        "since": "then",
        "token": "t",
    } | changes
    with files.atomic_write(f"{bucket}/{NAME}") as out:
        json.dump(marker | changes, out)


def test_a_marker_of_another_host_is_refused_with_the_way_to_remove_it(bucket):
    write_marker(bucket, host="elsewhere", process=7)
    with pytest.raises(UserError, match=rf"process 7 on elsewhere, since then.*gcloud storage rm {bucket}/\.lock"):
        lock_folder(bucket).__enter__()
    assert files.list_names(bucket) == [NAME]


def test_a_marker_of_an_earlier_process_with_this_number_is_replaced(bucket):
    write_marker(bucket)
    with lock_folder(bucket):
        assert json.loads(files.read_bytes(f"{bucket}/{NAME}"))["time"] > 0


def test_a_marker_that_was_replaced_by_hand_is_left_to_its_new_owner(bucket):
    with lock_folder(bucket):
        write_marker(bucket, token="another")
    assert files.list_names(bucket) == [NAME]


def test_a_repeated_request_finds_its_own_marker(bucket, monkeypatch):
    """The client repeats a request whose answer was lost, and is told that the object exists."""
    create = files.create_object

    def create_twice(path, data):
        create(path, data)
        create(path, data)

    monkeypatch.setattr(files, "create_object", create_twice)
    with lock_folder(bucket):
        assert files.list_names(bucket) == [NAME]


def test_a_bucket_that_does_not_exist_is_named(bucket):
    with pytest.raises(
        UserError, match=r"gs://no-such-bucket/run/\.lock cannot be written .*see that the bucket exists"
    ):
        lock_folder("gs://no-such-bucket/run").__enter__()
