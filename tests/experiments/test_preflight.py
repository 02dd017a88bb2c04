"""The check of a run for machines that are not there yet, and what a run may cost."""

from __future__ import annotations

import json

import pytest
from changes import changed

from agentr1_jax.errors import UserError
from configs import agentr1_grpo, countdown, quickstart
from experiments import plan, preflight
from experiments.setup import read_settings


@pytest.fixture
def config(tmp_path):
    """The quickstart on 16 devices."""
    return changed(quickstart.get_config(), run_dir=str(tmp_path / "run"), learner__rows=16, pretrain__rows=16)


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    monkeypatch.delenv("AGENTR1_DATA", raising=False)


def check(config, shape="v5e:4x4", speeds=()):
    return list(preflight.check([config], shape, speeds))


def test_a_run_that_fits_is_described_and_leaves_nothing(config, tmp_path):
    found = check(config)
    assert len(found) == 3 and "a new run" in found[0] and found[1] == "the task reads no data folder"
    assert "no speed is known" in found[2] and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({"mesh__fsdp": 3}, "v5e:4x4", r"mesh \{'data': 5, 'fsdp': 3, 'tensor': 1\} needs 15 devices, there are 16"),
        (
            {"mesh__fsdp": 16},
            "v5e:2*2x4",
            r"mesh\.fsdp x mesh\.tensor is 16 x 1; it must divide the 8 devices",
        ),
        (
            {"mesh__tensor": 8, "mesh__fsdp": 1, "learner__rows": 2, "pretrain__rows": 2},
            "v5e:4x4",
            r"mesh\.tensor is 8; it must divide",
        ),
        ({"rollout__groups": 30}, "v5e:4x4", r"rollout\.groups \(30\) must be a multiple of processes"),
        ({"optimizer__lr": -1.0}, "v5e:4x4", r"optimizer\.lr"),
        ({}, "4x4", r"--check=4x4: write KIND:PROCESSESxDEVICES"),
        ({}, "v5e:0x4", r"--check=v5e:0x4: write KIND:PROCESSESxDEVICES"),
        ({"hardware": "v5e-16"}, "v5e:2x4", r"hardware is v5e-16, which has 16 chips, and there are 8 devices"),
    ],
)
def test_what_the_workers_would_refuse_is_refused_here(config, changes, shape, message):
    with pytest.raises(UserError, match=message):
        check(changed(config, **changes), shape)


def test_the_hardware_to_come_decides_what_is_unset(config, monkeypatch):
    """Not the devices here: `auto` is asked of those of the check."""
    found = []
    monkeypatch.setattr(preflight, "check_placement", lambda settings, devices: found.append(settings.policy.attention))
    for kind in ("v5e", "gpu"):
        check(changed(config, hardware="auto", policy__attention=None, learner__row_tokens=None), f"{kind}:4x4")
    assert found == ["splash_tree", "xla"]  # RL batches of the quickstart are prefix trees.


def test_a_task_of_real_data_needs_a_folder_that_has_them(tmp_path, monkeypatch):
    config = changed(agentr1_grpo.get_config(), run_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"\(no --data\): no such data folder"):
        check(config)
    monkeypatch.setenv("AGENTR1_DATA", str(tmp_path))
    with pytest.raises(UserError, match="multihop"):
        check(config)
    monkeypatch.setenv("AGENTR1_DATA", "/mounted/on/the/workers")
    assert check(config)[1] == "/mounted/on/the/workers: not on this machine; the workers check it"


def test_every_task_of_several_runs_is_checked(config, tmp_path):
    with pytest.raises(UserError, match=r"\(no --data\): no such data folder"):
        other = changed(agentr1_grpo.get_config(), run_dir=str(tmp_path / "other"))
        list(preflight.check([config, other], "v5e:4x4"))


def test_buckets_are_listed_where_they_can_be_read(config, monkeypatch):
    monkeypatch.setenv("AGENTR1_DATA", "gs://bucket/data")
    monkeypatch.setattr(preflight, "_check_run_folder", lambda run_dir, config: run_dir)
    monkeypatch.setattr(preflight.files, "list_names", lambda folder: ["gsm8k", "multihop"])
    assert check(config)[1] == "gs://bucket/data: has gsm8k, multihop; the workers check the files"
    monkeypatch.setattr(preflight.files, "list_names", lambda folder: [])
    with pytest.raises(UserError, match="--data=gs://bucket/data: no such folder in the bucket, or an empty one"):
        check(config)

    def refuse(folder):
        raise PermissionError("anonymous")

    monkeypatch.setattr(preflight.files, "list_names", refuse)
    assert check(config)[1] == "gs://bucket/data: not read from here (PermissionError); the workers check it"


def test_a_folder_with_another_run_is_refused(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"format": 1, "seed": 7}))
    with pytest.raises(UserError, match="run"):
        check(config)


def test_hours_are_said_where_speeds_are():
    settings = read_settings(countdown.get_config())
    n, budget = settings.batch_trajectories, settings.budget
    decoded = n * min(budget.trajectory_tokens, settings.most_steps * budget.response_tokens)
    assert f"updates of {decoded:,} tokens decoded" in plan.describe_cost(settings, 16)
    seconds = 2 * settings.run.updates * decoded / 1000  # Learning as long as decoding.
    c = settings.learner
    learned = settings.microbatches(n // c.minibatches) * c.rows * c.row_tokens * c.minibatches * c.epochs
    said = plan.describe_cost(settings, 16, plan.parse_speeds(["1000", str(1000 * learned / decoded)]))
    assert f"{seconds / 3600:,.1f} hours x 16 devices = {16 * seconds / 3600:,.0f} device hours" in said
    for wrong in (["1"], ["1", "x"], ["1", "-2"], ["1", "nan"]):
        with pytest.raises(UserError, match="--tokens_per_second="):
            plan.parse_speeds(wrong)
