"""Ablations: arms and their configs, processes of a grid, results and tables; a slow test runs a real grid."""

from __future__ import annotations

import concurrent.futures
import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from rich.console import Console
from small_runs import SMALL

from agentr1_jax.errors import UserError
from agentr1_jax.report import ablation as report
from agentr1_jax.report.ablation import Ablation, ArmResult, Curve, RunResult
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.processes import StopRequest
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.trajectory import Outcome, Step, Trajectory
from agentr1_jax.trajectory_io import write_jsonl
from configs import quickstart, resolved
from experiments.ablation import checks, comparison, grid, jobs
from experiments.ablation.arms import parse_arms
from experiments.checks import check_placement
from experiments.setup import complete

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def config(tmp_path):
    """The quickstart's without a critic; its credit is step_gae with lam = .95."""
    out = quickstart.get_config()
    out.run_dir, out.critic = str(tmp_path / "run"), "none"
    return out


def cells_of(config, text, seeds=(0,), out="out"):
    return grid.make_grid(config, schemes(config, text), seeds, out)


def schemes(config, text, *more):
    return parse_arms([f"credit={text}", *more], config)


def test_arms_are_schemes_with_settings_and_changes(config):
    arms = schemes(config, " grpo, gigpo( norm = mean_std_norm , gamma=.9)+optimizer.lr=1e+3+loss.clip=dual,rloo,")
    assert [arm.changes.pop("credit.name") for arm in arms] == ["grpo", "gigpo", "rloo"]
    gigpo = {"credit.args.norm": "mean_std_norm", "credit.args.gamma": 0.9}
    assert arms[1].changes == {**gigpo, "optimizer.lr": "1e+3", "loss.clip": "dual"}
    assert arms[1].name == "gigpo(norm=mean_std_norm,gamma=.9)+optimizer.lr=1e+3+loss.clip=dual"
    (arm,) = schemes(config, "grpo+rollout.prefill_rows=(4,8)")
    assert arm.changes == {"credit.name": "grpo", "rollout.prefill_rows": "(4,8)"}


def test_any_keys_are_arms_and_lists_multiply(config):
    arms = parse_arms(["credit.name=grpo,step_gae", "learner.loss_mask=true,false"], config)
    assert [arm.name for arm in arms] == [
        "grpo+learner.loss_mask=true",
        "grpo+learner.loss_mask=false",
        "step_gae+learner.loss_mask=true",
        "step_gae+learner.loss_mask=false",
    ]
    config.learner.row_loss_tokens = 200
    _, cells = grid.make_grid(config, arms, [0], "out")
    assert [(c.config.credit.name, c.config.learner.loss_mask) for c in cells] == [
        ("grpo", True),
        ("grpo", False),
        ("step_gae", True),
        ("step_gae", False),
    ]
    assert "row_loss_tokens" in cells[1].note and not cells[0].note
    arms = parse_arms(["optimizer.lr=1e-3,1e-4+loss.clip=dual", "context.rule=append,window(4)"], config)
    assert [arm.name for arm in arms][2:] == [
        "optimizer.lr=1e-4+loss.clip=dual+context.rule=append",
        "optimizer.lr=1e-4+loss.clip=dual+context.rule=window(4)",
    ]
    _, cells = grid.make_grid(config, arms, [0], "out")
    assert [(c.config.optimizer.lr, c.config.loss.clip) for c in cells[1:3]] == [(1e-3, "ppo"), (1e-4, "dual")]


ARMS_FILE = """
import copy

def get_arms(config):
    for lr in (1e-3, config.optimizer.lr):
        yield f"lr {lr:g}", {"optimizer.lr": lr, "rollout": {"prefill_rows": [4, 8]}}
    yield "gigpo", {"credit": "gigpo(gamma=.9)"}
    changed = copy.deepcopy(config)
    changed.loss.clip, changed.critic, changed.seed, changed.run_dir = "dual", "shared_trunk", 9, "elsewhere"
    yield changed
    yield "both", changed
"""


def test_a_file_yields_arms(config, tmp_path):
    path = tmp_path / "my_arms.py"
    path.write_text(ARMS_FILE)
    arms = parse_arms([str(path), "budget.max_steps=4"], config)
    assert [arm.name for arm in arms] == [
        "lr 0.001+budget.max_steps=4",
        "lr 0.0003+budget.max_steps=4",
        "gigpo+budget.max_steps=4",
        "critic=shared_trunk+loss.clip=dual+budget.max_steps=4",
        "both+budget.max_steps=4",
    ]
    _, cells = grid.make_grid(config, arms, [3], "out")
    assert [cell.config.optimizer.lr for cell in cells[:2]] == [1e-3, 3e-4]
    assert cells[0].config.rollout.prefill_rows == (4, 8) and cells[0].folder == "out/lr_0.001+budget.max_steps=4/seed3"
    assert cells[2].config.credit.args.gamma == 0.9 and cells[2].config.budget.max_steps == 4
    for cell in cells[3:]:
        assert (cell.config.critic, cell.config.loss.clip, cell.config.seed) == ("shared_trunk", "dual", 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"bad.py has no function get_arms\(config\); get_arms\(config\) must yield pairs"),
        ("def get_arms(config): return 3", "get_arms returned a int"),
        ("def get_arms(config): return []", "yields no arm"),
        ("def get_arms(config): yield {'optimizer.lr': 1}", r"yields \{'optimizer.lr': 1\}; get_arms"),
        ("def get_arms(config): yield 'a', {'optimizer.ls': 1}", "^arm 'a': unknown key 'optimizer.ls'; did you mean"),
        (
            "def get_arms(config):\n  yield 'a', {}\n  config.optimizer.ls = 1",
            "line 3: unknown key 'optimizer.ls'; did",
        ),
    ],
)
def test_a_file_that_yields_none_is_refused(config, tmp_path, text, message):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        grid.make_grid(config, parse_arms([str(path)], config), [0], "out")


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (["loss.clip"], "--arms=loss.clip: write KEY=VALUE,VALUE"),
        (["loss.clip="], "--arms=loss.clip= has no values"),
        (["missing.py"], "missing.py: no such config file"),
        (["loss.clip=dual", "loss.clip=ppo"], "both set loss.clip"),
        (["credit=grpo", "credit.name=rloo"], "both set credit.name"),
        (["loss.clip=dual,dual"], "are one arm"),
        (["loss.clp=dual"], "^arm 'loss.clp=dual': unknown key 'loss.clp'; did you mean 'loss.clip'"),
        (["optimizer.lr=fast"], "^arm 'optimizer.lr=fast': key 'optimizer.lr' takes a float, not 'fast'"),
        (["optimizer.lr=-1"], "^arm 'optimizer.lr=-1': optimizer.lr"),
        (["loss.clip=sideways"], "^arm 'loss.clip=sideways': loss.clip"),
        (
            ["credit=grpo", "credit.args.lam=.5"],
            r"^arm 'grpo\+credit.args.lam=.5': credit scheme 'grpo' has no argument",
        ),
        (["eval.questions=5"], "changes eval.questions, which is the same for all arms"),
    ],
)
def test_an_arm_that_is_refused_is_named(config, lists, message):
    with pytest.raises(UserError, match=message):
        grid.make_grid(config, parse_arms(lists, config), [0], "out")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" , ", "--arms=credit= ,  has no values"),
        ("grpo()x", r"arm 'grpo\(\)x': credit: cannot read 'grpo\(\)x'; write name"),
        ("+loss.clip=dual", "has a key without a value"),
        ("gigpo(norm)", r"credit=gigpo\(norm\): name each argument"),
        ("grpo+loss.clip=dual+loss.clip=ppo", "sets something twice"),
        ("gigpo(gamma=1),gigpo( gamma=1 )", "are one arm"),
        ("grpo,warm_start", "unknown credit scheme 'warm_start'; choose one of"),
        ("grpo(lam=0.5)+loss.clp=dual", "unknown key 'loss.clp'; did you mean 'loss.clip'"),
        ("grpo+seed=3", "changes seed, which is the same for all arms; change it by --config.seed"),
    ],
)
def test_nonsense_is_refused(config, text, message):
    with pytest.raises(UserError, match=message):
        cells_of(config, text)


def test_seeds_that_are_none_or_come_twice_are_refused(config):
    for seeds in ((), (1, 1)):
        with pytest.raises(UserError, match="name different seeds"):
            cells_of(config, "grpo", seeds)
    with pytest.raises(UserError, match="write whole numbers"):
        grid.parse_seeds(["0", "x"])
    config.warm_start.control_seconds = 9.0
    with pytest.raises(UserError, match="control runs"):
        cells_of(config, "grpo")


def test_every_run_starts_from_the_warm_start_of_its_seed(config):
    starts, cells = cells_of(config, "grpo,token_gae,step_gae+loss.clip=dual", (0, 7))
    assert [(cell.arm, cell.seed) for cell in starts] == [("warm_start", 0), ("warm_start", 7)]
    assert [(cell.seed, cell.arm) for cell in cells] == [
        (seed, arm) for seed in (0, 7) for arm in ("grpo", "token_gae", "step_gae+loss.clip=dual")
    ]
    for start in starts:
        c = start.config
        assert (c.updates, c.seed, c.critic, c.credit.name) == (0, start.seed, "none", "reinforce")
        assert c.warm_start.updates == config.warm_start.updates and not c.warm_start.init_from
        check_placement(start.settings, [FakeDevice()])
    for cell in cells:
        check_placement(cell.settings, [FakeDevice()])
        (start,) = [start for start in starts if start.seed == cell.seed]
        assert cell.config.seed == cell.seed
        assert cell.after == cell.config.warm_start.init_from == start.folder == f"out/warm_start/seed{cell.seed}"
        assert cell.folder == f"out/{cell.arm}/seed{cell.seed}"
    # A setting stays where the arm's scheme knows it; a critic comes where it is needed, and is told.
    grpo, token, step = (cell.config for cell in cells[:3])
    assert (grpo.credit.args.lam, token.credit.args.lam, step.credit.args.lam) == (None, 0.95, 0.95)
    assert (grpo.critic, token.critic) == ("none", "shared_trunk")
    assert not cells[0].note and "shared_trunk" in cells[1].note
    assert (grpo.loss.clip, step.loss.clip) == ("ppo", "dual")
    assert config.credit.args.lam == 0.95 and config.critic == "none"
    config.optimizer.critic_warmup, config.rollout.samples = 5, 1  # The warm start has no use for them.
    starts, cells = cells_of(config, "token_gae,step_gae")
    for cell in (*starts, *cells):
        check_placement(cell.settings, [FakeDevice()])


def test_a_context_rule_has_a_warm_start_of_its_own(config):
    present = config.context.rule
    arms = f"grpo,grpo+context.rule=window(2),rloo+context.rule=window(2)+loss.clip=dual,rloo+context.rule={present}"
    starts, (grpo, windowed, clipped, same) = cells_of(config, arms)
    assert [(start.arm, start.folder, start.config.context.rule) for start in starts] == [
        ("warm_start", "out/warm_start/seed0", present),
        (
            "warm_start+context.rule=window(2)",
            "out/warm_start+context.rule=window_2/seed0",
            "window(2)",
        ),
    ]
    assert grpo.after == same.after == starts[0].folder and windowed.after == clipped.after == starts[1].folder
    assert starts[1].config.loss.clip == "ppo" and windowed.config.context.rule == "window(2)"


def test_what_changes_the_policy_or_its_lessons_has_a_warm_start_of_its_own(config):
    lists = ["policy.width=16,None", "loss.clip=dual,ppo", "task.hopworld.rewards.answer=.5"]
    starts, cells = grid.make_grid(config, parse_arms(lists, config), [0], "out")
    assert [start.arm for start in starts] == ["warm_start+policy.width=16", "warm_start"]
    assert [cell.after for cell in cells] == [starts[0].folder] * 2 + [starts[1].folder] * 2
    assert starts[0].config.policy.width == 16 and starts[0].config.task == config.task
    starts, cells = cells_of(config, "grpo,grpo+warm_start.lr=.01,grpo+task.name=frozenlake,grpo+policy.remat=none")
    assert [start.arm for start in starts] == [
        "warm_start",
        "warm_start+warm_start.lr=0.01",
        "warm_start+task.name=frozenlake",
    ]
    assert starts[2].config.task.name == cells[2].config.task.name == "frozenlake" and "questions" in cells[2].note
    ((start,), _) = cells_of(config, "grpo+warm_start.lr=.01+policy.width=16+pretrain.updates=0+warm_start.updates=7")
    assert start.arm == "warm_start+policy.width=16+warm_start.lr=0.01+warm_start.updates=7", "whatever the hash seed"
    assert cells[3].after == starts[0].folder
    starts, cells = cells_of(config, "grpo,grpo+warm_start.init_from=runs/a,grpo+warm_start.updates=0")
    assert [(start.arm, len(starts)) for start in starts] == [("warm_start", 1)]
    assert [cell.config.warm_start.init_from for cell in cells] == [starts[0].folder, "runs/a", ""]
    assert [cell.after for cell in cells] == [starts[0].folder, "", ""]


class FakeDevice:
    """One device of one process."""

    process_index = 0


def test_a_config_without_warm_start_has_none_to_share(config):
    config.warm_start.updates = 0
    starts, cells = cells_of(config, "grpo+policy.width=16")
    assert not starts and cells[0].after == "" == cells[0].config.warm_start.init_from
    config.warm_start.updates, config.warm_start.init_from = 9, "elsewhere"
    starts, cells = cells_of(config, "grpo")
    assert not starts and cells[0].after == "" and cells[0].config.warm_start.init_from == "elsewhere"


def test_a_cell_that_cannot_work_is_refused_with_its_arm(config):
    config.learner.rows = 8  # One a device of the tests.
    _, cells = cells_of(config, "grpo,grpo+learner.rows=7")
    assert checks.check_all([("grpo seed 0", cells[0].config)]) == "cpu"
    with pytest.raises(UserError, match=r"^arm grpo\+learner.rows=7 seed 0: .*learner.rows"):
        checks.check_all([(cell.title, cell.config) for cell in cells])


def test_a_run_of_another_config_is_refused_though_it_is_finished(config, tmp_path):
    _, (cell,) = cells_of(config, "grpo", out=str(tmp_path))
    RunFolder(str(cell.folder)).write_config(configs.resolve(complete(cell.config)))
    Path(cell.folder, "summary.json").write_text("{}")
    checks.check_folders([cell])
    config.optimizer.lr = 0.5
    _, (other,) = cells_of(config, "grpo", out=str(tmp_path))
    with pytest.raises(UserError, match=r"(?s)optimizer.lr: 0.0003 there, 0.5 here.*choose another --out"):
        checks.check_folders([other])


def test_a_cells_file_says_its_config_to_the_last_value(config, tmp_path):
    with config.unlocked():
        config.optimizer.args.beta = 0.5
    _, (cell,) = cells_of(config, "grpo+rollout.prefill_rows=(4,8)+budget.step_seconds=2", out=str(tmp_path))
    read = configs.load_config(f"{resolved.__file__}:{grid.write_config(cell)}")
    assert configs.resolve(read) == configs.resolve(cell.config)
    assert read.credit.args.lam is None and read.rollout.prefill_rows == (4, 8) and read.budget.step_seconds == 2.0


def test_the_hours_that_a_grid_will_take(config, tmp_path):
    (start,), cells = cells_of(config, "grpo,rloo,dr_grpo", out=str(tmp_path / "[red]"))
    assert checks.hours_left(cells, 2) is None and checks.hours_left([], 2) == 0
    os.makedirs(cells[0].folder)
    Path(cells[0].folder, "summary.json").write_text('{"seconds": 1800.0}')
    assert checks.hours_left(cells, 1) == 1.0 and checks.hours_left(cells, 9) == 0.5
    console = Console(file=io.StringIO(), width=300)
    console.print(checks.grid_table([start], cells, 1))
    text = console.file.getvalue()
    assert "1 of 1" in text and "unknown until one has finished" in text and f"{tmp_path}/[red]/" in text


PROGRAM = """
import json, os, signal, sys, time
path = sys.argv[1].partition(":")[2]
config = json.load(open(path))
folder = config["run_dir"]
os.makedirs(folder, exist_ok=True)
open(folder + "/config.json", "w").write("{}")
affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
open(folder + "/processes", "a").write(f"{os.getpid()}\\n")
open(folder + "/starts", "a").write(json.dumps([time.time(), affinity]) + "\\n")
assert not config["warm_start"]["init_from"] or os.path.exists(config["warm_start"]["init_from"] + "/summary.json")
print("hello from", folder, flush=True)
assert "GLIBC_TUNABLES" in os.environ, "it would start twice"
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
until = time.time() + float(os.environ.get("FAKE_SECONDS", "0"))
while time.time() < until and not stopped:
    time.sleep(0.05)
if stopped:
    sys.exit(0)
if os.environ.get("FAKE_FAILURE", "nothing") in folder:
    sys.exit("no luck")
open(folder + "/summary.json", "w").write('{"seconds": 1.0}')
"""


@pytest.fixture
def program(tmp_path):
    """A program that does what `experiments.train` does, without training."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [sys.executable, str(path)]


def run_all(cells, program, parallel=2, stop=None):
    console = Console(file=io.StringIO(), width=200)
    failed = jobs.run_all(cells, parallel=parallel, stop=stop or StopRequest(), console=console, program=program)
    return {(cell.arm, cell.seed): fault for cell, fault in failed.items()}, console.file.getvalue()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(jobs, "SECONDS_BETWEEN_LOOKS", 0.02)


def test_a_grid_is_run_resumed_and_left_alone_when_finished(config, tmp_path, program, monkeypatch):
    starts, cells = cells_of(config, "grpo,rloo", (0, 1), str(tmp_path / "out"))
    monkeypatch.setenv("FAKE_FAILURE", "rloo/seed1")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    left = Path(cells[0].folder, "tokenizer.model")
    left.parent.mkdir(parents=True)
    left.write_text("of a run that was killed before it began")
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    failed, said = run_all([*starts, *cells], program)
    assert list(failed) == [("rloo", 1)]
    assert "exit status 1" in failed["rloo", 1] and failed["rloo", 1].endswith("no luck")
    assert "rloo seed 1: failed" in said and "grpo seed 1: finished" in said
    assert [cell.is_finished for cell in cells] == [True, True, True, False]
    assert not left.exists() and (not cores or os.sched_getaffinity(0) == cores)
    had = {frozenset(json.loads(Path(cell.folder, "starts").read_text().splitlines()[0])[1]) for cell in cells}
    assert had <= set(jobs.core_shares(2))
    monkeypatch.delenv("FAKE_FAILURE")
    assert run_all([*starts, *cells], program)[0] == {} and cells[3].is_finished
    assert starts_of([*starts, *cells]) == [1, 1, 1, 1, 1, 2]
    assert Path(jobs.log_path(cells[3])).read_text().count("hello from") == 2
    monkeypatch.setattr(jobs, "start", None)
    assert run_all([*starts, *cells], program) == ({}, "")


def test_what_needs_a_failed_warm_start_is_not_started(config, tmp_path, program, monkeypatch):
    starts, cells = cells_of(config, "grpo", (0, 1), str(tmp_path / "out"))
    monkeypatch.setenv("FAKE_FAILURE", "warm_start/seed0")
    failed, _ = run_all([*starts, *cells], program, parallel=1)
    assert set(failed) == {("warm_start", 0), ("grpo", 0)} and "its warm start failed" in failed["grpo", 0]
    assert cells[1].is_finished and not os.path.exists(cells[0].folder)


def starts_of(cells):
    return [len(Path(cell.folder, "starts").read_text().splitlines()) for cell in cells]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("shares", [("0/1", "0/1"), ("0/2", "1/2")])
def test_commands_share_a_grid(config, tmp_path, program, monkeypatch, fails, shares):
    """Each run is made once; what starts from a warm start of the other waits for it, or hears that it has failed."""
    starts, cells = cells_of(config, "grpo,rloo", (0,), str(tmp_path / "out"))
    monkeypatch.setenv("FAKE_SECONDS", "0.3")
    monkeypatch.setenv("FAKE_FAILURE", "warm_start" if fails else "nothing")
    with concurrent.futures.ThreadPoolExecutor() as machines:
        parts = [grid.parse_share(share) for share in shares]
        results = list(machines.map(lambda part: run_all([*starts[part], *cells[part]], program, 1)[0], parts))
    failed = {key: fault for result in results for key, fault in result.items()}
    assert set(failed) == ({("warm_start", 0), ("grpo", 0), ("rloo", 0)} if fails else set())
    if shares[0] == shares[1]:
        assert set(results[0]) == set(results[1])
    assert [cell.is_finished for cell in (*starts, *cells)] == [not fails] * 3
    assert starts_of(starts) == [1] if fails else starts_of([*starts, *cells]) == [1, 1, 1]
    assert not list(tmp_path.glob("out/*/*.claim"))


COMMAND = """
import sys
from rich.console import Console
from agentr1_jax.runtime.processes import StopRequest
from experiments.ablation import grid, jobs
jobs.write_config = lambda cell: cell.config
cells = [grid.Cell("a", 0, sys.argv[1] + "/a/seed0", sys.argv[1] + "/seed0.json")]
jobs.run_all(cells, parallel=1, stop=StopRequest(), console=Console(), program=[sys.executable, sys.argv[2]])
"""


def test_the_run_of_a_killed_command_is_taken_over(tmp_path, program, monkeypatch):
    """Another process begins the first of three runs; it is killed, later its run, too, which this one resumes."""
    folders = [tmp_path / "out" / "a" / f"seed{k}" for k in range(3)]
    cells = [
        grid.Cell("a", k, str(folder), str(tmp_path / "out" / f"seed{k}.json")) for k, folder in enumerate(folders)
    ]
    monkeypatch.setattr(jobs, "write_config", lambda cell: cell.config)
    monkeypatch.setattr(jobs, "status", lambda cell: "")
    folders[0].parent.mkdir(parents=True)
    for cell in cells:
        Path(cell.config).write_text(json.dumps({"run_dir": cell.folder, "warm_start": {"init_from": ""}}))
    monkeypatch.setenv("FAKE_SECONDS", "60")
    other = subprocess.Popen([sys.executable, "-c", COMMAND, str(tmp_path / "out"), program[1]], cwd=ROOT)
    wait_until(lambda: os.path.exists(jobs.log_path(cells[0])) and "hello" in Path(jobs.log_path(cells[0])).read_text())
    assert jobs.owner_of(cells[0].folder).startswith(f"process {other.pid} on ")
    monkeypatch.setenv("FAKE_SECONDS", "0")
    with concurrent.futures.ThreadPoolExecutor() as apart:
        found = apart.submit(run_all, cells, program, 1)
        wait_until(lambda: cells[1].is_finished and cells[2].is_finished)
        other.kill()
        other.wait()
        time.sleep(0.2)
        assert not found.done() and len(starts_of(cells)) == 3  # The run goes on without its command, still claimed.
        os.kill(int((folders[0] / "processes").read_text()), signal.SIGKILL)
        failed, said = found.result(timeout=60)
    assert failed == {} and "waits for them" in said and starts_of(cells) == [2, 1, 1]


def wait_until(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "a/b", "1/0"])
def test_a_share_that_is_none_is_refused(text):
    with pytest.raises(UserError, match="write K/N with K from 0 to N - 1"):
        grid.parse_share(text)


def test_a_stop_is_passed_on_and_nothing_more_starts(config, tmp_path, program, monkeypatch):
    config.warm_start.updates = 0
    _, cells = cells_of(config, "grpo,rloo", (0, 1), str(tmp_path / "out"))
    monkeypatch.setenv("FAKE_SECONDS", "60")
    stop, began = StopRequest(), time.monotonic()
    looks = []

    def after_both_began(seconds):
        looks.append(seconds)
        stop.requested = all(
            os.path.exists(jobs.log_path(c)) and Path(jobs.log_path(c)).stat().st_size for c in cells[:2]
        )
        time_sleep(seconds)

    time_sleep = time.sleep
    monkeypatch.setattr(jobs.time, "sleep", after_both_began)
    failed, said = run_all(cells, program, stop=stop)
    assert failed == {} and "stopping" in said and time.monotonic() - began < 50
    assert [os.path.exists(cell.folder) for cell in cells] == [True, True, False, False]
    assert not any(cell.is_finished for cell in cells)


def test_cores_are_shared_out(monkeypatch):
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda _: {1, 2, 3, 5, 8, 9, 10}, raising=False)
    assert jobs.core_shares(1) == [{1, 2, 3, 5, 8, 9, 10}]
    shares = jobs.core_shares(3)
    assert sorted(core for share in shares for core in share) == [1, 2, 3, 5, 8, 9, 10]
    assert {len(share) for share in shares} == {2, 3}
    assert [len(share) for share in jobs.core_shares(9)] == [1] * 9
    monkeypatch.delattr(jobs.os, "sched_getaffinity")
    assert jobs.core_shares(2) == [frozenset(), frozenset()]


def test_the_status_of_a_run_is_read_from_the_end_of_its_metrics(config, tmp_path):
    _, (cell,) = cells_of(config, "grpo", out=str(tmp_path))
    assert jobs.status(cell) == "set-up"
    os.makedirs(cell.folder)
    records = [{"index": i, "phase": "rl", "update": i, "rollout/em": i / 100, "x": "y" * 5000} for i in range(1, 41)]
    records.insert(20, {"index": 99, "phase": "eval", "update": 20, "eval/em": 0.9})
    text = "".join(json.dumps(record) + "\n" for record in records)
    Path(cell.folder, "metrics.jsonl").write_text(text + '{"index": 41, "pha')
    assert jobs.status(cell) == f"rl 40/{config.updates}  em 0.400"


def result(scores, seconds=10.0, samples=(0, 80, 160), questions="abcd"):
    by_question = dict(zip(questions, scores, strict=True))
    x = np.asarray(samples, np.float64)
    curve = Curve(np.arange(len(x)) * 10, x, x / 8, np.linspace(0, np.mean(scores), len(x)))
    return RunResult(
        greedy=by_question, sampled={q: x / 2 for q, x in by_question.items()}, curve=curve, seconds=seconds
    )


ARMS = [
    ArmResult("grpo", {0: result([1, 0, 1, 0]), 1: result([1, 0, 0, 0], 30.0)}),
    ArmResult("rloo", {1: result([1, 1, 1, 0])}, missing=[0], note="with a critic"),
    ArmResult("opo", {}, missing=[0, 1]),
]


def ablation_of(*arms):
    return Ablation("quickstart", "em", arms, ["Look *here*."])


def random_arms(rng, seeds, effects=(0.0, 0.1, 0.0)):
    """Arms whose runs of one seed share what is hard."""
    hard = rng.uniform(0.3, 0.6, size=(seeds, 1))
    scores = [hard + effect + 0.05 * rng.normal(size=(seeds, 4)) for effect in effects]
    return [ArmResult(f"arm {i}", {k: result(x) for k, x in enumerate(of_arm)}) for i, of_arm in enumerate(scores)]


def test_comparisons_are_those_of_scipy():
    arms = random_arms(np.random.default_rng(4), 6)
    results = ablation_of(*arms)
    found = {(one.score, one.arm): one for one in results.comparisons}
    finals = np.array([[np.mean(list(run.greedy.values())) for run in arm.runs.values()] for arm in arms])
    p = [scipy.stats.ttest_rel(finals[i], finals[0]).pvalue for i in (1, 2)]
    for i in (1, 2):
        # `sampled` is half of `greedy` here and so is `area`: three times the same tests.
        for score, factor in (("greedy", 1), ("sampled", 0.5), ("area", 0.5)):
            one = found[score, f"arm {i}"]
            test = scipy.stats.ttest_rel(factor * finals[i], factor * finals[0])
            assert (one.n, one.pairs, one.p) == (6, 6, pytest.approx(test.pvalue))
            low, high = test.confidence_interval()
            assert (one.difference_low, one.difference_high) == pytest.approx((low, high))
            assert one.mean == pytest.approx(factor * finals[i].mean()) and one.iqm_low < one.iqm < one.iqm_high
            assert one.iqm == pytest.approx(scipy.stats.trim_mean(factor * finals[i], 0.25))
            better = scipy.stats.mannwhitneyu(finals[i], finals[0]).statistic / 36
            assert one.better == pytest.approx(better)
    assert min(p) < 0.01 and found["area", "arm 1"].p_holm == pytest.approx(6 * min(p))
    assert [one.p_holm for one in results.comparisons if one.arm == "arm 0"] == pytest.approx([np.nan] * 3, nan_ok=True)
    assert not any("Fewer than five" in text for text in report.describe(results))


def test_one_seed_has_no_interval_and_few_are_told_what_theirs_mean():
    """An interval over one seed had no width: `0.750 [0.750, 0.750]` in the column `area`."""
    one = ablation_of(ArmResult("grpo", {0: result([1, 1, 1, 0])}), ArmResult("rloo", {0: result([1, 1, 1, 1])}))
    rows = report.table_rows(one)
    assert [row["mean [95 %]"] for row in rows] == [f"{x:.3f} –" for x in (0.75, 1, 0.375, 0.5, 0.375, 0.5)]
    assert rows[1]["− first [95 %]"] == "0.250 –" and rows[1]["p"] == rows[1]["p, Holm"] == rows[1]["P(better)"] == "–"
    assert not any("[0" in value for row in rows for value in row.values())
    (few,) = [text for text in report.describe(one) if "Fewer than five seeds" in text]
    assert "12.7 (2 seeds), 4.3 (3 seeds), 3.2 (4 seeds)" in few and "One seed says nothing" in few
    # Two seeds that agree show no spread: no interval of no width, and no p of 0.
    two = [ArmResult(name, dict.fromkeys((0, 1), result(x))) for name, x in (("a", [1, 0, 0, 0]), ("b", [1, 1, 0, 0]))]
    row = report.table_rows(ablation_of(*two))[1]
    assert row["mean [95 %]"] == "0.500 (all alike)" and row["− first [95 %]"] == "0.250 (all alike)"
    assert row["p"] == "–" and row["P(better)"] == "1.00"


def test_the_table_pairs_by_seed_and_question_and_says_what_is_missing():
    first, second, third = ablation_of(*ARMS).comparisons[:3]
    assert (first.n, first.mean, first.pairs, second.n, third.n) == (2, 0.375, 0, 1, 0)
    # Seed 1 alone is common: .75 against .25, not against the .375 of both seeds.
    assert (second.pairs, second.difference) == (1, 0.5) and np.isnan(second.p) and np.isnan(third.mean)
    notes = [row["note"] for row in report.arm_rows(ablation_of(*ARMS))]
    assert notes == ["", "with a critic; seeds 0 missing", "seeds 0, 1 missing"]
    lost = ArmResult("rloo", {1: result([1, 1, 1], questions="bcd")})
    assert ablation_of(ARMS[0], lost).comparisons[1].difference == 1.0
    for elsewhere in ({2: result([1, 1, 1, 1])}, {1: result([1, 1], questions="xy")}):
        assert np.isnan(ablation_of(ARMS[0], ArmResult("rloo", elsewhere)).comparisons[1].difference)


def test_areas_end_where_the_shortest_curve_ends():
    short = ArmResult("short", {0: result([1, 1, 1, 1], samples=(0, 50, 100))})
    long = ArmResult("long", {0: result([1, 1, 1, 1], samples=(0, 150, 200))})
    results = ablation_of(short, long)
    area = {one.arm: one.mean for one in results.comparisons if one.score == "area"}
    assert results.samples == 100 and area["short"] == pytest.approx(0.5)
    assert area["long"] == pytest.approx((0 + 0.5 * 100 / 150) / 2)  # The first chord, until 100.


def test_pages_csv_and_json_are_written(tmp_path):
    results = ablation_of(*ARMS)
    report.write_markdown(tmp_path / "ablation.md", results)
    text = (tmp_path / "ablation.md").read_text()
    assert "| greedy | grpo | 2 | 0.375 [" in text and "seeds 0, 1 missing" in text and "Look *here*." in text
    assert "em over 4 questions" in text and "![learning curves](ablation.png)" in text
    assert "| rloo | - | 0.750 / 0.375 |" in text and "first 160 sampled trajectories" in text
    report.write_scores(tmp_path / "ablation.csv", results)
    report.write_curves(tmp_path / "curves.csv", results)
    scores, curves = (list(csv.DictReader(open_text(tmp_path / name))) for name in ("ablation.csv", "curves.csv"))
    assert len(scores) == 3 * 5 and scores[0] == {"arm": "grpo", "seed": "0", "score": "greedy", "value": "0.5"}
    assert {row["score"]: row["value"] for row in scores[5:10]} == {
        **{"greedy": "0.25", "sampled": "0.125", "area": "0.125"},
        **{"samples": "160.0", "seconds": "30.0"},
    }
    assert len(curves) == 9 and curves[-1] == {
        **{"arm": "rloo", "seed": "1", "update": "20", "samples": "160.0", "seconds": "20.0", "value": "0.75"}
    }
    document = json.loads(json.dumps(report.make_document(results), allow_nan=False))
    first, second, _ = document["arms"]
    assert first["scores"]["greedy"]["mean"] == 0.375 and second["scores"]["greedy"]["low"] is None
    assert second["runs"][0]["curve"]["samples"] == [0, 80, 160] and second["missing_seeds"] == [0]
    many = random_arms(np.random.default_rng(0), 5)
    for arms in (ARMS, many):
        report.plot_ablation(tmp_path / "ablation.png", ablation_of(*arms))
        assert (tmp_path / "ablation.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob("*.partial"))


def open_text(path):
    return io.StringIO(path.read_text())


def test_curves_count_what_was_sampled_and_how_long_it_took(config):
    config.rollout.groups, config.rollout.samples = 4, 8
    _, (grpo, remax) = cells_of(config, "grpo,remax")
    records = [
        {"phase": "eval", "update": 0, "eval/em": 0.1},
        {"phase": "rl", "update": 1, "time/rollout": 3.0, "time/learn": 1.0, "batch/dynamic_sampling_groups": 2.0},
        {"phase": "rl", "update": 2, "time/rollout": 5.0, "time/learn": 1.0, "batch/dynamic_sampling_groups": 0.0},
        {"phase": "eval", "update": 2, "eval/em": 0.3},
        {"phase": "rl", "update": 3, "time/rollout": 9.0, "time/learn": 9.0, "batch/dynamic_sampling_groups": 9.0},
    ]
    curve = comparison.learning_curve(records, grpo.settings, "em")
    assert [column.tolist() for column in curve] == [[0, 2], [0, 2 * 32 + 2 * 8], [0, 10], [0.1, 0.3]]
    assert comparison.learning_curve(records, remax.settings, "em").samples.tolist() == [0, 2 * (32 + 4) + 2 * 8]


def test_scores_come_from_the_final_evaluations_of_all_processes(tmp_path):
    def evaluated(index, metrics):
        step = Step(np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.float32), reward=0.0)
        identity = {"uid": f"u{index}", "group": index, "sample": 0, "task": "t", "seed": 0}
        return Trajectory(**identity, steps=(step,), outcome=Outcome.ANSWERED, metrics=metrics, row={"id": f"q{index}"})

    folder = tmp_path / "run [x]" / "trajectories"
    write_jsonl(folder / "eval_after_greedy.p0.jsonl.gz", [evaluated(0, {"em": 1.0}), evaluated(2, {})])
    write_jsonl(folder / "eval_after_greedy.p1.jsonl.gz", [evaluated(1, {"em": 0.0, "f1": 0.5})])
    write_jsonl(folder / "eval_after_sampled.jsonl.gz", [evaluated(0, {"em": 0.25})])
    assert comparison.scores(str(folder.parent), "eval_after_greedy", "em") == {"q0": 1.0, "q1": 0.0}
    assert comparison.scores(str(folder.parent), "eval_after_sampled", "em") == {"q0": 0.25}
    with pytest.raises(UserError, match="no metric 'speed'; it has em, f1"):
        comparison.scores(str(folder.parent), "eval_after_greedy", "speed")
    with pytest.raises(UserError, match="the evaluation is missing or empty"):
        comparison.scores(str(folder.parent), "eval_before_sampled", "em")


def command(out: Path, *arguments: str) -> list[str]:
    keys = {**SMALL, "critic": "none", "checkpoint.every": 1, "updates": 2}
    return [
        *(sys.executable, "-m", "experiments.ablate", "--config=configs/quickstart.py", f"--out={out}"),
        *(f"--config.{key}={value}" for key, value in keys.items()),
        *("--schemes=grpo,step_gae", "--seeds=0", *arguments),
    ]


@pytest.mark.slow
def test_a_grid_is_stopped_resumed_and_compared(tmp_path: Path) -> None:
    out = tmp_path / "grid"
    started = subprocess.Popen(command(out), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 500
    while not list(out.glob("*/seed*/trajectories/rl_000000.jsonl.gz")) and time.monotonic() < deadline:
        time.sleep(0.1)
    started.send_signal(signal.SIGTERM)
    said, _ = started.communicate(timeout=200)
    assert started.returncode == 0 and "stopped; the same command goes on" in said, said
    assert len(list(out.glob("*/seed*/summary.json"))) < 3
    done = subprocess.run(command(out, "--json"), cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(list(out.glob("*/seed*/summary.json"))) == 3
    document = json.loads(done.stdout)
    assert [(arm["arm"], arm["scores"]["greedy"]["n"]) for arm in document["arms"]] == [("grpo", 1), ("step_gae", 1)]
    assert "critic=shared_trunk" in document["arms"][1]["note"]
    assert document["arms"][0]["runs"][0]["curve"]["samples"] == [0, 8, 16] and "12.7 (2 seeds)" in done.stderr
    assert len((out / "ablation.csv").read_text().splitlines()) == 1 + 2 * 5
    # What the arms sampled before RL is the same, token for token, though one has a critic.
    folders = [out / arm / "seed0" for arm in ("grpo", "step_gae", "warm_start")]
    assert len({(folder / "trajectories/eval_before_sampled.jsonl.gz").read_bytes() for folder in folders}) == 1
    assert json.loads((folders[2] / "summary.json").read_text())["updates"] == 0
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("*/seed*/*")}
    refused = subprocess.run(command(out, "--config.optimizer.lr=0.5"), cwd=ROOT, capture_output=True)
    assert refused.returncode == 2 and b"optimizer.lr: 0.0003 there, 0.5 here" in refused.stderr
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/seed*/*")} == stamps
