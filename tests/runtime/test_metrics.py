"""Metrics: what is written is read back without a seam, and what TensorBoard and W&B are told of it."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime import metrics
from agentr1_jax.runtime.metrics import MetricsWriter, SinksConfig, read_metrics
from agentr1_jax.runtime.sinks import TensorBoard, WandB, check_sinks, curves, make_sinks
from configs import frozenlake
from experiments.setup import read_settings


def test_records_are_read_back(tmp_path):
    record = {
        "phase": "rl",
        "update": 3,
        "loss": np.float32(0.5),
        "norm": jnp.asarray(2.0),
        "half": jnp.asarray(1.5, jnp.bfloat16),
        "tokens": np.int64(7),
        "skipped": np.bool_(True),
        "parts": {"em": 1.0, "hist": np.arange(2)},
        "bad": float("nan"),
        "worse": jnp.asarray(-jnp.inf),
    }
    with MetricsWriter(tmp_path / "run", next_index=0) as writer:
        writer.write(record)
        # Flushed: readable while the writer is still open.
        (stored,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert stored == {
        "index": 0,
        "phase": "rl",
        "update": 3,
        "loss": 0.5,
        "norm": 2.0,
        "half": 1.5,
        "tokens": 7,
        "skipped": True,
        "parts": {"em": 1.0, "hist": [0, 1]},
        "bad": "nan",
        "worse": "-inf",
    }
    assert math.isnan(float(stored["bad"]))
    assert float(stored["worse"]) == -math.inf


@settings(max_examples=30)
@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8), st.sampled_from([b"", b'{"ind', b'{"index": 7}']))
def test_a_resumed_file_has_no_seam(tmp_path_factory, written, checkpoint, after, cut_short):
    checkpoint = min(checkpoint, written)
    run_dir = tmp_path_factory.mktemp("run")
    with MetricsWriter(run_dir, next_index=0) as writer:
        for update in range(written):
            writer.write({"update": update, "life": 1})
    with open(run_dir / "metrics.jsonl", "ab") as raw:
        raw.write(cut_short)
    with MetricsWriter(run_dir, next_index=checkpoint) as writer:
        for update in range(checkpoint, checkpoint + after):
            writer.write({"update": update, "life": 2})
        assert writer.next_index == checkpoint + after
    records = read_metrics(run_dir / "metrics.jsonl")
    assert [record["index"] for record in records] == list(range(checkpoint + after))
    assert [record["update"] for record in records] == list(range(checkpoint + after))
    assert [record["life"] for record in records] == [1] * checkpoint + [2] * after
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]


def test_metrics_in_a_bucket_are_written_with_every_checkpoint_and_have_no_seam(bucket, monkeypatch):
    path = f"{bucket}/run/metrics.jsonl"
    with MetricsWriter(f"{bucket}/run", next_index=0) as writer:
        writer.write({"update": 0, "life": 1})  # The first is written at once: there is something to look at.
        for update in range(1, 4):
            writer.write({"update": update, "life": 1})
        assert len(read_metrics(path)) == 1
        writer.sync()
        assert len(read_metrics(path)) == 4
        monkeypatch.setattr(metrics, "REWRITE_SECONDS", 0.0)
        writer.sync()
        writer.write({"update": 4, "life": 1})
        assert len(read_metrics(path)) == 5
    with MetricsWriter(f"{bucket}/run", next_index=2) as writer:
        writer.write({"update": 2, "life": 2})
    assert [(r["index"], r["life"]) for r in read_metrics(path)] == [(0, 1), (1, 1), (2, 2)]
    assert files.list_names(f"{bucket}/run") == ["metrics.jsonl"]


def test_a_disabled_writer_counts_and_writes_nothing(tmp_path):
    sink = Broken("open")
    with MetricsWriter(tmp_path / "run", next_index=4, enabled=False, sinks=[sink]) as writer:
        writer.write({"loss": 1.0})
    assert writer.next_index == 5 and sink.calls == []
    assert not (tmp_path / "run").exists()


def test_a_corrupt_line_is_named_and_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    text = json.dumps({"index": 0}) + "\nnonsense\n" + json.dumps({"index": 2}) + "\n"
    path.write_text(text)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
        MetricsWriter(tmp_path, next_index=1)
    assert path.read_text() == text


def test_what_is_no_metric_is_refused(tmp_path):
    with MetricsWriter(tmp_path, next_index=0) as writer:
        with pytest.raises(TypeError, match="object"):
            writer.write({"loss": object()})
        assert writer.next_index == 0
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def rl(update, loss=0.5, **more):
    return {"phase": "rl", "update": update, "learner/loss": loss, **more}


def scalars(folder):
    """All scalars that TensorBoard itself reads, [(update, value), ...] by tag."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_curves_are_numbers_by_phase_and_path():
    record = {"index": 7, **rl(3, "nan", parts={"em": 1, "deep": {"x": True}}, text="a", hist=[1, 2])}
    told = curves(record)
    assert math.isnan(told.pop("rl/learner/loss"))
    assert told == {"rl/parts/em": 1.0, "rl/parts/deep/x": 1.0}
    assert curves({"index": 0, "phase": "eval_sampled", "update": 0, "eval/em": 0.5}) == {"eval_sampled/em": 0.5}


def test_tensorboard_reads_what_was_written(tmp_path):
    with MetricsWriter(tmp_path, 0, sinks=[TensorBoard(str(tmp_path / "tensorboard"))]) as writer:
        writer.write({"phase": "warm_start", "update": 10, "learner/loss": 3.0})
        writer.write(rl(1, 0.5))
        writer.write(rl(2, float("inf")))
        writer.write({"phase": "eval", "update": 2, "eval/em": 0.25})
    assert scalars(tmp_path / "tensorboard") == {
        "warm_start/learner/loss": [(10, 3.0)],
        "rl/learner/loss": [(1, 0.5), (2, math.inf)],
        "eval/em": [(2, 0.25)],
    }


def test_a_resumed_run_has_no_update_twice_in_tensorboard_also_for_a_viewer_that_was_open(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "tensorboard"
    with MetricsWriter(tmp_path, 0, sinks=[TensorBoard(str(folder))]) as writer:
        for update in range(1, 6):
            writer.write(rl(update, 1.0))
    viewer = accumulators.EventAccumulator(str(folder))
    viewer.Reload()
    with MetricsWriter(tmp_path, 3, sinks=[TensorBoard(str(folder))]) as writer:
        writer.write(rl(4, 2.0))
    viewer.Reload()
    expected = [(1, 1), (2, 1), (3, 1), (4, 2)]
    assert [(e.step, e.value) for e in viewer.Scalars("rl/learner/loss")] == expected
    assert scalars(folder) == {"rl/learner/loss": expected}


class Remote:
    """A W&B of the test: runs by id, each with all that was logged and the curves' own axes."""

    def __init__(self):
        self.runs, self.axes, self.asked = {}, {}, []

    def init(self, **asked):
        self.asked.append(asked)
        logged = self.runs.setdefault(asked["id"], [])
        run = types.SimpleNamespace(step=logged[-1][0] + 1 if logged else 0, finish=lambda: None)
        if asked["mode"] == "offline":
            run.step = 0
        run.define_metric = lambda name, step_metric: self.axes.__setitem__(name, step_metric)
        run.log = lambda values, step: logged.append((step, values))
        return run

    def Settings(self, **settings):
        return settings


@pytest.fixture
def remote(monkeypatch):
    remote = Remote()
    monkeypatch.setitem(sys.modules, "wandb", remote)
    return remote


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_resumed_run_goes_on_in_its_run_of_wandb(tmp_path, remote, mode):
    def start(next_index, updates, sinks=True):
        given = make_sinks(SinksConfig(False, "p" if sinks else "", mode), str(tmp_path / "mine"), {"seed": 0})
        with MetricsWriter(tmp_path / "mine", next_index, sinks=given) as writer:
            for update in updates:
                writer.write(rl(update, float(update)))

    start(0, [0, 1], sinks=False)
    start(2, [2, 3, 4])  # Turned on later: it gets all.
    start(3, [3])  # Killed before it came as far as the start before.
    start(3, [3, 4, 5])
    (logged,) = remote.runs.values()
    assert [step for step, _ in logged] == list(range(6))
    assert logged[5] == (5, {"rl/learner/loss": 5.0, "rl/update": 5})
    assert remote.axes == {"rl/*": "rl/update"}
    assert {(a["project"], a["resume"], a["name"], a["mode"]) for a in remote.asked} == {("p", "allow", "mine", mode)}


def test_wandb_itself_takes_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    failures = []
    monkeypatch.setattr(logging, "warning", lambda *a: failures.append(a))
    with MetricsWriter(tmp_path, 0, sinks=[WandB(str(tmp_path), "p", "offline", {"seed": 0})]) as writer:
        writer.write(rl(1, float("nan")))
    name = json.loads((tmp_path / "wandb.json").read_text())["id"]
    (path,) = tmp_path.glob(f"wandb/offline-run-*-{name}/run-{name}.wandb")
    until = time.monotonic() + 60  # W&B's own process writes the file; on a busy machine that takes a while.
    while b"rl/learner/loss" not in path.read_bytes() and time.monotonic() < until:
        time.sleep(0.1)
    assert not failures and b"rl/learner/loss" in path.read_bytes()


class Broken:
    name = "broken"

    def __init__(self, method):
        self.method, self.calls = method, []

    def __getattr__(self, method):
        def called(*args):
            self.calls.append(method)
            if method == self.method:
                raise OSError("no route to host")

        return called


@pytest.mark.parametrize("method", ["open", "write", "close"])
def test_a_sink_that_fails_is_told_once_and_the_run_goes_on(tmp_path, monkeypatch, method):
    said = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: said.append(text % args))
    broken, whole = Broken(method), Broken(None)
    with MetricsWriter(tmp_path, 0, sinks=[broken, whole]) as writer:
        writer.write(rl(1))
        writer.write(rl(2))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    assert len(said) == 1 and f"broken: {method} failed (OSError: no route to host)" in said[0]
    assert whole.calls == ["open", "write", "write", "close"]
    assert broken.calls == whole.calls[: whole.calls.index(method) + 1]


@pytest.mark.parametrize(
    ("changes", "missing", "told"),
    [
        ({"sinks.tensorboard": True}, "tensorboardX", r"sinks\.tensorboard is True.*pip install 'agentr1_jax\[tensor"),
        ({"sinks.wandb_project": "p"}, "wandb", r"sinks\.wandb_project is 'p'.*pip install 'agentr1_jax\[wandb\]'"),
        ({"sinks.tensorboard": True, "run_dir": "gs://b/r"}, "", r"which the bucket of run_dir \(gs://b/r\) cannot"),
        (
            {"sinks.wandb_project": "p", "sinks.wandb_mode": "offline", "run_dir": "gs://b/r"},
            "",
            "offline leaves files to send later",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(tmp_path, monkeypatch, changes, missing, told):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == missing else object() if name in ("tensorboardX", "wandb") else find(name, *a),
    )
    config = frozenlake.get_config()
    config.update_from_flattened_dict({"run_dir": str(tmp_path / "run")} | changes)
    with pytest.raises(UserError, match=told):
        settings = read_settings(config)
        check_sinks(settings.sinks, settings.run.run_dir)
    assert not list(tmp_path.iterdir())
