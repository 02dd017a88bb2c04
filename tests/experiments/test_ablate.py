"""Ablations: arms and their configs, processes of a grid, statistics, tables; a slow test runs a real grid."""

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
from rich.console import Console
from small_runs import SMALL

from agentr1_jax.errors import UserError
from agentr1_jax.report import ablation
from agentr1_jax.report.ablation import ArmResult, RunResult
from agentr1_jax.report.statistics import area_under, mean_interval, paired_difference, two_stage_interval
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.processes import StopRequest
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.trajectory import Outcome, Step, Trajectory
from agentr1_jax.trajectory_io import write_jsonl
from configs import quickstart, resolved
from experiments.ablation import checks, comparison, grid, jobs
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
    return grid.make_grid(config, grid.parse_arms(text), seeds, out)


def test_arms_are_schemes_with_settings_and_changes():
    arms = grid.parse_arms(" grpo, gigpo( norm = mean_std_norm , gamma=.9)+optimizer.lr=1e+3+loss.clip=dual,rloo,")
    assert [arm.scheme for arm in arms] == ["grpo", "gigpo", "rloo"]
    assert arms[1].settings == {"norm": "mean_std_norm", "gamma": 0.9}
    assert arms[1].changes == {"optimizer.lr": "1e+3", "loss.clip": "dual"}
    assert arms[1].name == "gigpo(norm=mean_std_norm,gamma=.9)+optimizer.lr=1e+3+loss.clip=dual"
    (arm,) = grid.parse_arms("grpo+rollout.prefill_rows=(4,8)")
    assert arm.changes == {"rollout.prefill_rows": "(4,8)"} and not arm.settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" , ", "--schemes is empty"),
        ("grpo()x", r"'grpo\(\)x' is not an arm; write SCHEME"),
        ("+loss.clip=dual", "is not an arm"),
        ("gigpo(norm)", "has a setting without a value"),
        ("grpo+loss.clip=dual+loss.clip=ppo", "sets something twice"),
        ("gigpo(gamma=1),gigpo( gamma=1 )", "are one arm"),
        ("grpo,warm_start", "unknown credit scheme 'warm_start'; choose one of"),
        ("grpo(lam=0.5)+loss.clp=dual", "unknown key 'loss.clp'; did you mean 'loss.clip'"),
        ("grpo+seed=3", "changes seed, which is the same for all arms; change it by --config.seed"),
        ("grpo+task.name=frozenlake", "changes task.name"),
        (
            "grpo+policy.width=16",
            r"(?s)needs? a warm start of its own:\n  policy\.width: None there, 16 here\nall arms",
        ),
        ("grpo+warm_start.lr=1.0", r"(?s)warm start of its own:\n  warm_start\.lr\n"),
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
        assert c.warm_start.updates == 900 and not c.warm_start.init_from
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


def test_masks_multiply_the_grid():
    arms = grid.cross(grid.parse_arms("grpo,rloo"), "learner.loss_mask", ["true", "false"], True)
    assert [arm.name for arm in arms] == [
        "grpo",
        "grpo+learner.loss_mask=false",
        "rloo",
        "rloo+learner.loss_mask=false",
    ]
    assert [arm.changes["learner.loss_mask"] for arm in arms] == ["true", "false"] * 2
    for values in (["yes"], ["true", "true"]):
        with pytest.raises(UserError, match="write true, false, or both"):
            grid.cross(arms, "learner.advantage_mask", values, True)
    with pytest.raises(UserError, match="sets learner.loss_mask, and so does --loss_mask"):
        grid.cross(arms, "learner.loss_mask", ["true"], True)


def test_a_cell_that_cannot_work_is_refused_with_its_folder(config):
    config.learner.rows = 8  # One a device of the tests.
    _, cells = cells_of(config, "grpo,grpo+learner.row_tokens=64")
    assert checks.check_all([cells[0].config]) == "cpu"
    with pytest.raises(UserError, match=r"learner.row_tokens=64/seed0: learner.row_tokens \(64\) is less than"):
        checks.check_all([cell.config for cell in cells])


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
        config.optimizer.args.own = 0.5
    _, (cell,) = cells_of(config, "grpo+rollout.prefill_rows=(4,8)+budget.step_seconds=2", out=str(tmp_path))
    read = configs.load_config(f"{resolved.__file__}:{grid.write_config(cell)}")
    assert configs.resolve(read) == configs.resolve(cell.config)
    assert read.credit.args.lam is None and read.rollout.prefill_rows == (4, 8) and read.budget.step_seconds == 2.0


def test_the_hours_that_a_grid_will_take(config, tmp_path):
    (start,), cells = cells_of(config, "grpo,rloo,dr_grpo", out=str(tmp_path))
    assert checks.hours_left(cells, 2) is None and checks.hours_left([], 2) == 0
    os.makedirs(cells[0].folder)
    Path(cells[0].folder, "summary.json").write_text('{"seconds": 1800.0}')
    assert checks.hours_left(cells, 1) == 1.0 and checks.hours_left(cells, 9) == 0.5
    console = Console(file=io.StringIO(), width=150)
    console.print(checks.grid_table([start], cells, 1))
    assert "1 of 1" in console.file.getvalue() and "unknown until one has finished" in console.file.getvalue()


PROGRAM = """
import json, os, signal, sys, time
path = sys.argv[1].partition(":")[2]
config = json.load(open(path))
folder = config["run_dir"]
os.makedirs(folder, exist_ok=True)
open(folder + "/config.json", "w").write("{}")
affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
open(folder + "/starts", "a").write(json.dumps([time.time(), affinity]) + "\\n")
assert not config["warm_start"]["init_from"] or os.path.exists(config["warm_start"]["init_from"] + "/summary.json")
print("hello from", folder, flush=True)
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
    begun = [len(Path(cell.folder, "starts").read_text().splitlines()) for cell in (*starts, *cells)]
    assert begun == [1, 1, 1, 1, 1, 2]
    assert Path(jobs.log_path(cells[3])).read_text().count("hello from") == 2
    monkeypatch.setattr(jobs, "start", None)
    assert run_all([*starts, *cells], program) == ({}, "")


def test_what_needs_a_failed_warm_start_is_not_started(config, tmp_path, program, monkeypatch):
    starts, cells = cells_of(config, "grpo", (0, 1), str(tmp_path / "out"))
    monkeypatch.setenv("FAKE_FAILURE", "warm_start/seed0")
    failed, _ = run_all([*starts, *cells], program, parallel=1)
    assert set(failed) == {("warm_start", 0), ("grpo", 0)} and "its warm start failed" in failed["grpo", 0]
    assert cells[1].is_finished and not os.path.exists(cells[0].folder)


@pytest.mark.parametrize("fails", [False, True])
def test_machines_share_a_grid(config, tmp_path, program, monkeypatch, fails):
    """Each makes its share; what starts from a warm start of the other waits for it, or hears that it has failed."""
    starts, cells = cells_of(config, "grpo,rloo", (0,), str(tmp_path / "out"))
    monkeypatch.setenv("FAKE_SECONDS", "0.3")
    monkeypatch.setenv("FAKE_FAILURE", "warm_start" if fails else "nothing")
    shares = [grid.parse_share(f"{k}/2") for k in range(2)]
    with concurrent.futures.ThreadPoolExecutor() as machines:
        results = machines.map(lambda share: run_all([*starts[share], *cells[share]], program)[0], shares)
    failed = {key: fault for result in results for key, fault in result.items()}
    assert set(failed) == ({("warm_start", 0), ("grpo", 0), ("rloo", 0)} if fails else set())
    assert [cell.is_finished for cell in (*starts, *cells)] == [not fails] * 3
    begun = [len(Path(cell.folder, "starts").read_text().splitlines()) for cell in (*starts, *cells) if not fails]
    assert begun == [] if fails else begun == [1, 1, 1]


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
    assert jobs.status(cell) == "rl 40/40  em 0.400"


def test_degenerate_intervals_are_exact():
    assert mean_interval(np.array([0.3])) == (0.3, 0.3, 0.3)
    assert mean_interval(np.full(5, 0.25)) == (0.25, 0.25, 0.25)
    assert two_stage_interval([np.full(4, 1.0), np.full(4, 1.0)], same_questions=True) == (1, 1, 1)
    two = mean_interval(np.array([0.2, 0.6]))
    assert two == pytest.approx((0.4, 0.2, 0.6))


def test_intervals_cover_as_often_as_is_said():
    """The table in the docstring, and 95 % where there are many seeds or only questions."""
    rng = np.random.default_rng(0)
    for count, covers in ((2, 0.50), (3, 0.75), (5, 0.86), (20, 0.92)):
        found = [mean_interval(rng.normal(size=count), seed=i, draws=200) for i in range(200)]
        assert np.mean([low <= 0 <= high for _, low, high in found]) == pytest.approx(covers, abs=0.08)
    one_seed = [two_stage_interval([rng.normal(size=50)], same_questions=True, seed=i, draws=200) for i in range(150)]
    assert np.mean([low <= 0 <= high for _, low, high in one_seed]) == pytest.approx(0.94, abs=0.04)
    width = np.mean([high - low for _, low, high in one_seed])
    assert width == pytest.approx(2 * 1.96 / np.sqrt(50), rel=0.05)


@pytest.mark.parametrize("same", [True, False])
def test_both_stages_enter_an_interval(same):
    """Seeds, and questions which all seeds share: neither averages out in the other."""
    rng = np.random.default_rng(1)
    seeds, questions = rng.normal(size=(30, 1)), rng.normal(size=(1, 40))

    def half_width(values):
        found = two_stage_interval(list(values), same_questions=same)
        return (found.high - found.low) / 2 / 1.96

    over_seeds = half_width(seeds + 0 * questions)
    over_questions = half_width(0 * seeds + questions)
    assert over_seeds == pytest.approx(seeds.std(ddof=1) / np.sqrt(30), rel=0.1)
    expected = questions.std(ddof=1) / np.sqrt(40 if same else 40 * 29)  # 29 of 30 seeds are drawn.
    assert over_questions == pytest.approx(expected, rel=0.1)
    assert half_width(seeds + questions) == pytest.approx(np.hypot(over_seeds, over_questions), rel=0.1)


def test_pairing_takes_away_what_both_arms_share():
    rng = np.random.default_rng(2)
    hard = rng.normal(size=60) + 5 * rng.normal(size=(8, 1))
    ours, theirs = hard + 0.1 * rng.normal(size=(8, 60)), hard + 0.1 * rng.normal(size=(8, 60))
    equal = paired_difference(list(ours), list(theirs), same_questions=True)
    assert equal.low < 0 < equal.high and equal.high - equal.low < 0.05
    better = paired_difference(list(ours + 0.2), list(theirs), same_questions=True)
    assert better == pytest.approx(tuple(x + 0.2 for x in equal)) and better.low > 0.1
    assert paired_difference(list(ours), list(ours)) == (0, 0, 0)


def test_the_area_is_the_mean_height_of_the_curve():
    assert area_under(np.array([0.0, 10.0, 40.0]), np.array([0.0, 1.0, 1.0])) == pytest.approx((5 + 30) / 40)
    assert area_under(np.array([7.0]), np.array([0.5])) == 0.5


def result(scores, seconds=10.0, updates=(0, 10, 20), questions="abcd"):
    by_question = dict(zip(questions, scores, strict=True))
    curve = (np.array(updates), np.linspace(0, np.mean(scores), len(updates)))
    return RunResult(
        greedy=by_question, sampled={q: x / 2 for q, x in by_question.items()}, curve=curve, seconds=seconds
    )


ARMS = [
    ArmResult("grpo", {0: result([1, 0, 1, 0]), 1: result([1, 0, 0, 0], 30.0)}),
    ArmResult("rloo", {1: result([1, 1, 1, 0])}, missing=[0], note="with a critic"),
    ArmResult("opo", {}, missing=[0, 1]),
]


def test_the_table_pairs_by_seed_and_question_and_says_what_is_missing():
    first, second, third = ablation.table_rows(ARMS)
    assert first["n"] == 2 and first["greedy"].mean == 0.375 and first["sampled"].mean == 0.1875
    assert first["area"].mean == pytest.approx(0.1875) and first["seconds"] == 20.0
    assert first["greedy − first"] is None and first["note"] == ""
    # Seed 1 alone is common: .75 against .25, not against the .375 of both seeds.
    assert second["greedy − first"].mean == 0.5 and second["sampled − first"].mean == 0.25
    assert second["note"] == "with a critic; seeds 0 missing"
    assert third["n"] == 0 and third["greedy"] is None and third["note"] == "seeds 0, 1 missing"
    lost = ArmResult("rloo", {1: result([1, 1, 1], questions="bcd")})
    assert ablation.difference(lost, ARMS[0], "greedy").mean == 1.0
    elsewhere = ArmResult("rloo", {2: result([1, 1, 1, 1])})
    assert ablation.difference(elsewhere, ARMS[0], "greedy") is None


def test_seeds_with_other_questions_are_drawn_by_themselves():
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(20, 30))
    names = [[f"q{i}" for i in range(30)], [f"r{i}" for i in range(30)]]
    same = ArmResult("a", {i: result(scores[0], questions=names[0]) for i in range(20)})
    other = ArmResult("a", {i: result(scores[0], questions=[f"{i}{q}" for q in names[1]]) for i in range(20)})
    wide, narrow = (ablation.final_scores(arm, "greedy") for arm in (same, other))
    assert wide.mean == pytest.approx(narrow.mean) and wide.high - wide.low > 3 * (narrow.high - narrow.low)


def test_tables_and_curves_are_written(tmp_path):
    ablation.write_markdown(tmp_path / "ablation.md", ARMS, title="quickstart", metric="em", remarks=["Look *here*."])
    text = (tmp_path / "ablation.md").read_text()
    assert "| grpo | 2 | 0.375 [" in text and "seeds 0, 1 missing" in text and "Look *here*." in text
    assert "em over 4 questions" in text and "![learning curves](ablation.png)" in text
    assert "| rloo | - | 0.750 / 0.375 |" in text and "the same draw for all" in text
    ablation.write_csv(tmp_path / "ablation.csv", ARMS)
    with open(tmp_path / "ablation.csv", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["arm"] for row in rows] == ["grpo", "rloo", "opo"]
    assert float(rows[1]["greedy_minus_first"]) == 0.5 and rows[2]["greedy"] == "nan"
    assert float(rows[0]["greedy_low"]) <= 0.375 <= float(rows[0]["greedy_high"])
    for arms in (ARMS, ARMS[2:]):
        ablation.plot_ablation(tmp_path / "ablation.png", arms, title="quickstart", metric="em")
        assert (tmp_path / "ablation.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob("*.partial"))


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
    done = subprocess.run(command(out), cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(list(out.glob("*/seed*/summary.json"))) == 3
    with open(out / "ablation.csv", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["arm"], row["n"]) for row in rows] == [("grpo", "1"), ("step_gae", "1")]
    assert "critic=shared_trunk" in rows[1]["note"]
    # What the arms sampled before RL is the same, token for token, though one has a critic.
    folders = [out / arm / "seed0" for arm in ("grpo", "step_gae", "warm_start")]
    assert len({(folder / "trajectories/eval_before_sampled.jsonl.gz").read_bytes() for folder in folders}) == 1
    assert json.loads((folders[2] / "summary.json").read_text())["updates"] == 0
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("*/seed*/*")}
    refused = subprocess.run(command(out, "--config.learner.rows=2"), cwd=ROOT, capture_output=True)
    assert refused.returncode == 2 and b"learner.rows: 4 there, 2 here" in refused.stderr
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/seed*/*")} == stamps
