"""The lock of a run's folder: one owner, freed however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from agentr1_jax.errors import UserError
from agentr1_jax.runtime.lock import NAME, RunLock

HOLDER = """
import sys, time
from agentr1_jax.runtime.lock import RunLock
lock = RunLock(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_run_is_refused_and_told_by_whom(tmp_path):
    with RunLock(tmp_path / "run"):
        with pytest.raises(UserError, match=rf"another run is at work there \(process {os.getpid()} on "):
            RunLock(tmp_path / "run")
        with RunLock(tmp_path / "other"):
            pass
    assert os.listdir(tmp_path) == []
    with RunLock(tmp_path / "run"):
        (tmp_path / "run" / "config.json").touch()
    assert os.listdir(tmp_path / "run") == ["config.json"]


def test_a_killed_owner_leaves_it_free(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {holder.pid} on "):
            RunLock(tmp_path)
        holder.send_signal(signal.SIGKILL)
    assert NAME in os.listdir(tmp_path)
    RunLock(tmp_path).release()


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    """Between opening and locking, the owner of before may remove the file: that lock would be nobody's."""
    real, removed = os.open, []

    def opened(path, *arguments):
        file = real(path, *arguments)
        if not removed:
            removed.append(path)
            os.unlink(path)
        return file

    monkeypatch.setattr(os, "open", opened)
    with RunLock(tmp_path), pytest.raises(UserError, match="another run is at work"):
        RunLock(tmp_path)
    assert removed == [str(tmp_path / NAME)]


def test_an_owner_without_a_name_is_refused_too(tmp_path):
    with RunLock(tmp_path):
        (tmp_path / NAME).write_text("")
        with pytest.raises(UserError, match="has not written its name"):
            RunLock(tmp_path)


def test_whose_folder_is_removed_under_it_leaves_the_lock_of_the_next_alone(tmp_path):
    first = RunLock(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    second = RunLock(tmp_path / "run")
    first.release()
    with pytest.raises(UserError, match="another run is at work"):
        RunLock(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    second.release()
