"""Runs whose folder lies in a bucket, against an emulator: what is saved comes back, and a stopped run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import program
from small_runs import ROOT, SMALL

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime import metrics as metrics_files
from agentr1_jax.runtime.checkpoint import COMMITTED, INVENTORY, Checkpoints, find_newest_intact
from agentr1_jax.runtime.lock import NAME, lock_folder
from agentr1_jax.runtime.metrics import MetricsWriter, read_metrics
from agentr1_jax.train.restore import newest_checkpoint
from agentr1_jax.trajectory_io import read_jsonl
from configs import quickstart
from experiments.setup import read_settings

export_hf = program("export_hf")
kill_test = program("kill_test")


def test_what_no_bucket_can_hold_is_refused_at_the_start(tmp_path):
    def config(**keys):
        with quickstart.get_config().unlocked() as config:
            config.update_from_flattened_dict(keys)
        return config.lock()

    for key in ("policy.weights", "task.data_dir"):
        with pytest.raises(UserError, match=rf"{key} is gs://b/x, and only run_dir, .* copy it to this machine"):
            read_settings(config(**{key: "gs://b/x"}))
    with pytest.raises(UserError, match="OUT must be a local folder"):
        export_hf.export(str(tmp_path), "gs://b/x")


def test_metrics_are_written_with_every_checkpoint_and_have_no_seam(bucket, monkeypatch):
    path = f"{bucket}/run/metrics.jsonl"
    with MetricsWriter(f"{bucket}/run", next_index=0) as writer:
        writer.write({"update": 0, "life": 1})  # The first is written at once: there is something to look at.
        for update in range(1, 4):
            writer.write({"update": update, "life": 1})
        assert len(read_metrics(path)) == 1
        writer.sync()
        assert len(read_metrics(path)) == 4
        monkeypatch.setattr(metrics_files, "REWRITE_SECONDS", 0.0)
        writer.sync()
        writer.write({"update": 4, "life": 1})
        assert len(read_metrics(path)) == 5
    with MetricsWriter(f"{bucket}/run", next_index=2) as writer:
        writer.write({"update": 2, "life": 2})
    assert [(r["index"], r["life"]) for r in read_metrics(path)] == [(0, 1), (1, 1), (2, 2)]
    assert files.list_names(f"{bucket}/run") == ["metrics.jsonl"]


def numbers(value):
    """A state whose values tell which checkpoint it came from, and what to restore it into."""
    state = {"a": jnp.full((30, 100), value), "b": {"c": jnp.full(7, value)}}
    return state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def written(folder, steps):
    checkpoints = Checkpoints(folder, keep=3)
    for step in steps:
        checkpoints.save(step, numbers(float(step))[0], {"step": step})
    checkpoints.close()
    return numbers(0.0)[1]


def restored_step(folder, like):
    checkpoints = Checkpoints(folder, keep=3)
    state, record = checkpoints.restore(like)
    checkpoints.close()
    assert all((np.asarray(leaf) == record["step"]).all() for leaf in jax.tree.leaves(state))
    return record["step"]


def test_checkpoints_come_back_and_a_damaged_one_is_kept_aside(bucket):
    like = written(bucket, (1, 2, 3, 4))
    folder = f"{bucket}/checkpoints"
    assert files.list_names(folder) == ["2", "3", "4"] and restored_step(bucket, like) == 4
    expected = json.loads(files.read_bytes(f"{folder}/4/{INVENTORY}"))
    assert expected.items() <= files.file_sizes(f"{folder}/4").items() and any(n.startswith("state/") for n in expected)

    with files.atomic_write(f"{folder}/4/record/metadata") as out:
        out.write("{")
    part = next(name for name in files.file_sizes(f"{folder}/3") if name.startswith("state/ocdbt"))
    files.remove(f"{folder}/3/{part}")
    assert find_newest_intact(folder) == (2, [4, 3])
    assert restored_step(bucket, like) == 2
    assert files.list_names(folder) == ["2"] and files.list_names(f"{folder}.damaged") == ["3.0", "4.0"]
    written(bucket, (3, 4))
    assert restored_step(bucket, like) == 4


def test_a_checkpoint_that_is_still_being_written_does_not_count(bucket):
    like = written(bucket, (1, 2))
    files.remove(f"{bucket}/checkpoints/2/{COMMITTED}")
    assert find_newest_intact(f"{bucket}/checkpoints") == (1, [])
    assert newest_checkpoint(bucket) == f"{bucket}/checkpoints/1"
    assert restored_step(bucket, like) == 1


def command(folder: str, **overrides: object) -> list[str]:
    keys = {**SMALL, "run_dir": folder, **overrides}
    arguments = ["--config=configs/quickstart.py", *(f"--config.{key}={value}" for key, value in keys.items())]
    return [sys.executable, "-m", "experiments.train", *arguments]


@pytest.mark.nightly
def test_a_run_in_a_bucket_is_stopped_and_goes_on_as_one_on_a_disk(bucket, tmp_path):
    run, local = f"{bucket}/run", str(tmp_path / "run")
    habits = {"updates": 8, "rollout.deterministic": True, "profile_updates": "6:7"}
    with lock_folder(run):
        refused = subprocess.run(command(run, **habits), cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert refused.returncode == 2 and f"process {os.getpid()} on " in refused.stderr, refused.stderr[-3000:]
    assert files.list_names(run) == []
    started = subprocess.Popen(
        command(run, **habits), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 400
    while not files.exists(f"{run}/trajectories/rl_000001.jsonl.gz") and time.monotonic() < deadline:
        time.sleep(0.2)
    started.send_signal(signal.SIGTERM)
    output, _ = started.communicate(timeout=200)
    assert started.returncode == 0 and "the same command resumes" in output, output[-3000:]
    assert not files.exists(f"{run}/summary.json") and not files.exists(f"{run}/{NAME}")
    resumed = 1 + max(r["update"] for r in read_metrics(f"{run}/metrics.jsonl") if r["phase"] == "rl")
    for folder in (run, local):
        done = subprocess.run(command(folder, **habits), cwd=ROOT, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]

    def told(folder):
        records = []
        for r in read_metrics(f"{folder}/metrics.jsonl"):
            # Of the batch that it was stopped in, groups that were finished are not sampled again.
            left_out = ("time/", *kill_test.WORK) if r["phase"] == "rl" and r["update"] == resumed else ("time/",)
            records.append({key: x for key, x in r.items() if not key.startswith(left_out)})
        return records

    def sampled(folder, update):
        out = read_jsonl(f"{folder}/trajectories/rl_{update:06d}.jsonl.gz")
        return [(t.uid, [(s.response_ids.tobytes(), s.logprobs.tobytes()) for s in t.steps]) for t in out]

    for mine, expected in zip(told(run), told(local), strict=True):
        assert {key for key in mine.keys() | expected.keys() if mine.get(key) != expected.get(key)} == set()
    assert files.list_names(f"{run}/trajectories") == files.list_names(f"{local}/trajectories")
    for update in range(8):
        assert sampled(run, update) == sampled(local, update)
    assert files.list_names(run) == files.list_names(local)
    assert files.read_bytes(f"{run}/tokenizer.model") == files.read_bytes(f"{local}/tokenizer.model")
    assert any(name.endswith(".xplane.pb") for name in files.file_sizes(f"{run}/profile"))

    tool = [sys.executable, "-m"]
    for arguments in (
        ["experiments.evaluate", run, "--questions=4", "--modes=agent"],
        ["experiments.ask", run, "--question_row=eval/1"],
        ["experiments.export_hf", run, str(tmp_path / "exported")],
        ["experiments.credit_compare", run, "--schemes=grpo,rloo", "--resamples=20"],
    ):
        done = subprocess.run([*tool, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, (arguments, done.stderr[-3000:])
    assert {"evaluation.json", "report.html", "scores.jsonl.gz"} <= set(files.list_names(f"{run}/evaluation"))
    assert {"report.html", "summary.md", "schemes.csv"} <= set(files.list_names(f"{run}/credit_compare"))
    assert "model.safetensors" in os.listdir(tmp_path / "exported")
