"""A run whose folder lies in a bucket, against an emulator: stopped, it goes on as one on a disk does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from programs import program
from small_runs import ROOT, command

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime.lock import NAME
from agentr1_jax.runtime.metrics import read_metrics
from agentr1_jax.trajectory_io import read_jsonl
from configs import quickstart
from experiments.setup import read_settings

export_hf = program("export_hf")
kill_test = program("kill_test")
UPDATES = 6


def test_what_no_bucket_can_hold_is_refused_at_the_start(tmp_path):
    for key in ("policy.weights", "task.data_dir"):
        with quickstart.get_config().unlocked() as config:
            config.update_from_flattened_dict({key: "gs://b/x"})
        with pytest.raises(UserError, match=rf"{key} is gs://b/x, and only run_dir, .* copy it to this machine"):
            read_settings(config.lock())
    with pytest.raises(UserError, match="OUT must be a local folder"):
        export_hf.export(str(tmp_path), "gs://b/x")


@pytest.mark.nightly
def test_a_run_in_a_bucket_is_stopped_and_goes_on_as_one_on_a_disk(bucket, tmp_path):
    run, local = f"{bucket}/run", str(tmp_path / "run")

    def train(folder):
        changes = {"updates": UPDATES, "rollout__deterministic": True, "profile_updates": "4:5"}
        return [sys.executable, "-m", "experiments.train", *command("quickstart", folder, **changes)]

    started = subprocess.Popen(train(run), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 400
    while not files.exists(f"{run}/trajectories/rl_000001.jsonl.gz") and time.monotonic() < deadline:
        time.sleep(0.2)
    started.send_signal(signal.SIGTERM)
    output, _ = started.communicate(timeout=200)
    assert started.returncode == 0 and "the same command resumes" in output, output[-3000:]
    assert not files.exists(f"{run}/summary.json") and not files.exists(f"{run}/{NAME}")
    resumed = 1 + max(r["update"] for r in read_metrics(f"{run}/metrics.jsonl") if r["phase"] == "rl")
    for folder in (run, local):
        done = subprocess.run(train(folder), cwd=ROOT, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]

    def records_of(folder):
        records = []
        for r in read_metrics(f"{folder}/metrics.jsonl"):
            # Of the batch that it was stopped in, groups that were finished are not sampled again.
            left_out = ("time/", *kill_test.WORK) if r["phase"] == "rl" and r["update"] == resumed else ("time/",)
            records.append({key: x for key, x in r.items() if not key.startswith(left_out)})
        return records

    def sampled_tokens(folder, update):
        out = read_jsonl(f"{folder}/trajectories/rl_{update:06d}.jsonl.gz")
        return [(t.uid, [(s.response_ids.tobytes(), s.logprobs.tobytes()) for s in t.steps]) for t in out]

    for mine, expected in zip(records_of(run), records_of(local), strict=True):
        assert {key for key in mine.keys() | expected.keys() if mine.get(key) != expected.get(key)} == set()
    for update in range(UPDATES):
        assert sampled_tokens(run, update) == sampled_tokens(local, update)
    assert files.list_names(run) == files.list_names(local)
    assert files.list_names(f"{run}/trajectories") == files.list_names(f"{local}/trajectories")
    assert files.read_bytes(f"{run}/tokenizer.model") == files.read_bytes(f"{local}/tokenizer.model")
    assert any(name.endswith(".xplane.pb") for name in files.file_sizes(f"{run}/profile"))

    for arguments in (
        ["experiments.evaluate", run, "--questions=4", "--modes=agent"],
        ["experiments.credit_compare", run, "--schemes=grpo,rloo", "--resamples=20"],
    ):
        tool = [sys.executable, "-m", *arguments]
        done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, (arguments, done.stderr[-3000:])
    assert {"evaluation.json", "report.html", "scores.jsonl.gz"} <= set(files.list_names(f"{run}/evaluation"))
    assert {"report.html", "summary.md", "schemes.csv"} <= set(files.list_names(f"{run}/credit_compare"))
