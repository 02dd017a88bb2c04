"""Sinks of metrics: what TensorBoard and W&B are told, also by runs that were resumed, and that neither ends a run."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
import types

import pytest
from absl import logging

from agentr1_jax.errors import UserError
from agentr1_jax.runtime.metrics import MetricsWriter, SinksConfig, read_metrics
from agentr1_jax.runtime.sinks import FailsafeSink, TensorBoard, WandB, check_sinks, curves, make_sinks
from configs import frozenlake
from experiments.setup import read_settings


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


def test_a_resumed_run_has_no_update_twice_in_tensorboard(tmp_path):
    folder = tmp_path / "tensorboard"
    with MetricsWriter(tmp_path, 0, sinks=[TensorBoard(str(folder))]) as writer:
        for update in range(1, 6):
            writer.write(rl(update, 1.0))
    with MetricsWriter(tmp_path, 3, sinks=[TensorBoard(str(folder))]) as writer:
        writer.write(rl(4, 2.0))
    assert scalars(folder) == {"rl/learner/loss": [(1, 1), (2, 1), (3, 1), (4, 2)]}


def test_a_viewer_that_was_open_forgets_what_was_cut_off(tmp_path):
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
    assert [(e.step, e.value) for e in viewer.Scalars("rl/learner/loss")] == [(1, 1), (2, 1), (3, 1), (4, 2)]


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
    for _ in range(2):
        with MetricsWriter(tmp_path, 0, sinks=[WandB(str(tmp_path), "p", "offline", {"seed": 0})]) as writer:
            writer.write(rl(1, float("nan")))
        time.sleep(1.1)  # Its folders are named by the second.
    name = json.loads((tmp_path / "wandb.json").read_text())["id"]
    written = [path.read_bytes() for path in tmp_path.glob(f"wandb/offline-run-*-{name}/run-{name}.wandb")]
    assert not failures and sum(b"rl/learner/loss" in data for data in written) == 1


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
    with MetricsWriter(tmp_path, 0, sinks=[FailsafeSink(broken), FailsafeSink(whole)]) as writer:
        writer.write(rl(1))
        writer.write(rl(2))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    assert len(said) == 1 and f"broken: {method} failed (OSError: no route to host)" in said[0]
    assert whole.calls == ["open", "write", "write", "close"]
    assert broken.calls == whole.calls[: whole.calls.index(method) + 1]


def test_a_process_that_writes_no_metrics_opens_no_sink(tmp_path):
    sink = Broken("open")
    with MetricsWriter(tmp_path, 0, enabled=False, sinks=[sink]) as writer:
        writer.write(rl(1))
    assert sink.calls == []


@pytest.mark.parametrize(
    ("changes", "missing", "told"),
    [
        ({"sinks.tensorboard": True}, "tensorboardX", r"sinks\.tensorboard is True.*pip install 'agentr1_jax\[tensor"),
        ({"sinks.wandb_project": "p"}, "wandb", r"sinks\.wandb_project is 'p'.*pip install 'agentr1_jax\[wandb\]'"),
        ({"sinks.wandb_mode": "maybe"}, "", "sinks.wandb_mode is 'maybe'; it must be 'online' or 'offline'"),
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
