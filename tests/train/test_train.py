"""The training script as a user runs it: small runs of the real thing in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pages
import pytest
from small_runs import ROOT, UNOPTIMISED, check_metric_names, command, small_config, train

from agentr1_jax.agents.session import Identity, ScriptedSession
from agentr1_jax.errors import UserError
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.checkpoint import Checkpoints
from agentr1_jax.runtime.metrics import read_metrics
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build
from agentr1_jax.train.restore import restore_decoder
from agentr1_jax.trajectory import Outcome, Trajectory
from agentr1_jax.trajectory_io import read_jsonl
from configs import quickstart
from experiments.setup import check_init_from, make_task, read_settings


def in_order(run_dir: Path) -> list[tuple]:
    return [(r["index"], r["phase"], r["update"]) for r in read_metrics(run_dir / "metrics.jsonl")]


def test_importing_everything_leaves_jax_untouched() -> None:
    """Devices and processes can only be set before the first JAX program."""
    code = "import jax, experiments.train; jax.config.update('jax_num_cpu_devices', 3); print(jax.device_count())"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.stdout == "3\n", done.stderr


def test_the_quickstart_budget_lets_the_right_way_through(tmp_path: Path) -> None:
    """A flawless expert answers everything within the limits on steps and tokens, and on practice rows too."""
    with quickstart.get_config().unlocked() as config:
        config.run_dir = str(tmp_path)
        config.task.hopworld.flaws = dict.fromkeys(config.task.hopworld.flaws, 0.0)
    settings = read_settings(config)
    task = make_task(settings, ToolMetrics(), None)
    tokenizer = build.make_tokenizer(settings, task, resumes=False)
    agent = build.make_agent(settings, task, tokenizer)

    async def play(split: str, index: int) -> Trajectory:
        row = task.row(split, index)
        session = ScriptedSession(Identity("u", 0, 0, task.name, index), task.expert(row, index), tokenizer)
        await agent.run(session, row)
        return session.trajectory()

    for split in ("eval", "practice"):
        played = [asyncio.run(play(split, index)) for index in range(48)]
        assert sum(t.metrics["em"] for t in played) / len(played) >= 0.99
        assert {t.outcome for t in played} == {Outcome.ANSWERED}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What a run leaves of which another one may start, with a checkpoint that holds nothing."""
    config = small_config(tmp_path / "source", critic="separate", seed=5)
    RunFolder(str(config.run_dir)).write_config(configs.resolve(config))
    (tmp_path / "source" / "tokenizer.model").write_bytes(b"pieces")
    (tmp_path / "source" / "summary.json").touch()
    (tmp_path / "source" / "checkpoints" / "3").mkdir(parents=True)
    return tmp_path / "source"


GRPO = {"credit__name": "grpo", "credit__args__lam": None}
"""A scheme that works with and without a critic."""


def save_start(config):
    """Checkpoints what a run would start from; returns it."""
    settings = read_settings(config)
    policy = build.make_policy(settings, types.SimpleNamespace(vocab_size=128, name="t"))
    state = build.make_state_builder(settings, policy, build.make_learner_mesh(settings)).init()
    checkpoints = Checkpoints(config.run_dir, keep=2)
    checkpoints.save(4, state, {})
    checkpoints.close()
    return state


def test_the_decoder_of_another_run_comes_whatever_the_critics(tmp_path: Path, source: Path) -> None:
    theirs = save_start(small_config(source, critic="separate", seed=5)).params["decoder"]
    for critic, parts in (("none", {"decoder"}), ("separate", {"decoder", "critic", "value"})):
        run = small_config(tmp_path / critic, critic=critic, seed=6, warm_start__init_from=str(source), **GRPO)
        check_init_from(run)
        params = save_start(run).params
        assert set(params) == parts
        for part in parts - {"value"}:
            jax.tree.map(np.testing.assert_array_equal, params[part], theirs)
    control = small_config(tmp_path / "run", warm_start__init_from=str(source), warm_start__control_seconds=1.0)
    check_init_from(control)
    assert read_settings(control).imitates and not read_settings(run).imitates  # A control goes on with imitation.
    own = save_start(small_config(tmp_path / "own", critic="none", seed=6, **GRPO)).params["decoder"]
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(theirs), strict=True))

    def like(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=jax.numpy.zeros(1).sharding)

    with pytest.raises(UserError, match="lacks parameters of this policy"):
        restore_decoder(str(source), {"other": like(2)})
    for wrong in (like(2, 2), {"embedding": like(2, 2)}):
        with pytest.raises(UserError, match=r"source/checkpoints/4/state: "):
            restore_decoder(str(source), {"embed": wrong})


def test_adapters_of_another_run_come_with_the_weights_under_them(tmp_path: Path) -> None:
    lora = {"policy__lora__rank": 2, "critic": "none", **GRPO}
    config = small_config(tmp_path / "source", seed=5, **lora)
    RunFolder(str(config.run_dir)).write_config(configs.resolve(config))
    (tmp_path / "source" / "tokenizer.model").write_bytes(b"pieces")
    (tmp_path / "source" / "summary.json").touch()
    theirs = save_start(config)
    run = small_config(tmp_path / "run", seed=5, warm_start__init_from=config.run_dir, **lora)
    check_init_from(run)
    jax.tree.map(np.testing.assert_array_equal, save_start(run).params, theirs.params)
    with pytest.raises(UserError, match=r"(?s)another policy:\n  seed: 5 there, 6 here\n"):
        check_init_from(small_config(tmp_path / "run", seed=6, warm_start__init_from=config.run_dir, **lora))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"policy__width": 64, "policy__qk_norm": True},
            r"(?s)qk_norm: None there, True here\n  policy.width: 32 there",
        ),
        ({"tokenizer__vocab_size": 99}, "tokenizer.vocab_size: 1536 there, 99 here"),
        ({"run_dir": "{source}/../source"}, "the run's own folder"),
        ({"warm_start__init_from": "nowhere"}, "nowhere: no run"),
    ],
)
def test_a_run_that_rl_cannot_start_from_is_refused(
    tmp_path: Path, source: Path, overrides: dict, message: str
) -> None:
    given = {k: v.format(source=source) if isinstance(v, str) else v for k, v in overrides.items()}
    with pytest.raises(UserError, match=message):
        check_init_from(small_config(**{"run_dir": tmp_path / "run", "warm_start__init_from": str(source), **given}))


def test_a_run_that_is_older_than_a_key_has_its_default(tmp_path: Path, source: Path) -> None:
    older = tmp_path / "older"
    shutil.copytree(source, older)
    record = json.loads((older / "config.json").read_text())
    del record["policy"]["yarn"]
    (older / "config.json").write_text(json.dumps(record))
    check_init_from(small_config(tmp_path / "run", warm_start__init_from=str(older)))
    with pytest.raises(UserError, match=r"policy.yarn.factor: 1.0 there, 4.0 here"):
        check_init_from(small_config(tmp_path / "run", warm_start__init_from=str(older), policy__yarn__factor=4.0))


def test_only_a_whole_run_can_be_started_from(tmp_path: Path, source: Path) -> None:
    run = small_config(tmp_path / "run", warm_start__init_from=str(source), policy__remat="full", seed=8)
    check_init_from(run)  # How a policy is computed may differ.
    for name, message in (
        ("summary.json", r"source is not finished .* by the command that started it"),
        ("tokenizer.model", r"its tokenizer\.model is gone"),
        ("checkpoints", "has no checkpoint yet"),
    ):
        (source / name).rename(source / "gone")
        with pytest.raises(UserError, match=message):
            check_init_from(run)
        (source / "gone").rename(source / name)
    (source / "config.json").write_text("[]")
    with pytest.raises(UserError, match="not a config"):
        check_init_from(run)


@pytest.mark.slow
def test_a_run_of_failures_alone_is_no_success(tmp_path: Path) -> None:
    """No trajectory begins in time: all are dropped, no batch holds anything, and the run ends as one that failed."""
    run = tmp_path / "run"
    done = train("quickstart", run, optimised=False, warm_start__updates=0, budget__trajectory_seconds=1e-9)
    assert done.returncode == 2 and "the policy is what it was" in done.stderr, done.stderr[-3000:]
    records = [r for r in read_metrics(run / "metrics.jsonl") if r["phase"] == "rl"]
    assert [r["batch/dropped"] for r in records] == [8, 8] and "learner/loss" not in records[0]


@pytest.mark.slow
def test_a_control_run_learns_from_demonstrations_until_its_time_is_up(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for _ in range(2):  # A finished run that is started again only writes its report anew.
        done = train("quickstart", run, warm_start__control_seconds=20.0, checkpoint__every=1)
        assert done.returncode == 0, done.stderr[-3000:]
        summary = json.loads((run / "summary.json").read_text())
        assert summary["updates"] == 0 and 20 <= summary["warm_start_seconds"] < summary["seconds"]
        assert {"em_control_sampled", "em_control_greedy"} <= set(summary)
        assert not any(key.startswith(("em_before", "em_after")) for key in summary)
        phases = [phase for _, phase, _ in in_order(run)]
        assert set(phases[:-2]) == {"warm_start"} and phases[-2:] == ["eval_sampled", "eval"]
    short = train("quickstart", tmp_path / "short", warm_start__control_seconds=0.01, warm_start__demonstrations=64)
    assert short.returncode == 2 and "were over before an update" in short.stderr


@pytest.mark.slow
def test_rl_starts_from_another_run(tmp_path: Path) -> None:
    """Whatever critic it has: the same tokens are sampled before RL, and the folder stands alone afterwards."""
    source, run = tmp_path / "source", tmp_path / "run"
    done = train("quickstart", source, updates=0)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((source / "summary.json").read_text())
    assert summary["updates"] == 0 and "em_before_greedy" in summary and "em_after_greedy" not in summary
    kept = {"warm_start__init_from": source, "critic": "separate", "checkpoint__every": 1}
    started = subprocess.Popen(
        [sys.executable, "-m", "experiments.train", *command("quickstart", run, updates=3, **kept)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 300
    while not (run / "trajectories" / "rl_000000.jsonl.gz").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    started.send_signal(signal.SIGTERM)
    output, _ = started.communicate(timeout=120)
    assert started.returncode == 0 and "the same command resumes" in output, output[-3000:]
    for name in (
        "tokenizer.model",
        "trajectories/eval_before_sampled.jsonl.gz",
        "trajectories/eval_before_greedy.jsonl.gz",
    ):
        assert (run / name).read_bytes() == (source / name).read_bytes()
    source.rename(tmp_path / "elsewhere")
    done = train("quickstart", run, updates=3, **kept)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {phase for _, phase, _ in in_order(run)} == {"eval_sampled", "eval", "rl"}
    assert json.loads((run / "summary.json").read_text())["updates"] == 3


HANGING = """
import asyncio, pathlib, time
from agentr1_jax.envs.base import Observation, Transition
from agentr1_jax.envs.datasets import RowsTask
from agentr1_jax.envs.registry import register

class Hanging:
    async def reset(self, row, seed):
        self.hangs = row["hangs"]
        return Observation(messages=[{"role": "user", "content": "?"}])

    async def step(self, action):
        if self.hangs:
            pathlib.Path(__file__).with_name("hangs").touch()
            if BLOCKS:
                time.sleep(1000)
            asyncio.create_task(asyncio.to_thread(time.sleep, 1000))
            asyncio.create_task(self.ignore_everything())
            await self.ignore_everything()
        return Transition(None, 1.0, terminated=True)

    def truncate(self):
        return {}

    async def ignore_everything(self):
        while True:
            try:
                await asyncio.sleep(1000)
            except BaseException:
                pass

@register("hanging")
def make_hanging(config, run):
    rows = [{"id": str(i), "question": "?", "answers": ["!"], "hangs": i == 1} for i in range(4)]
    return RowsTask("hanging", {"train": rows[:2], "eval": rows[2:]}, Hanging)
"""


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True], ids=["ignores every cancellation", "blocks the event loop"])
def test_a_run_whose_environment_hangs_ends_when_it_is_asked_to(blocks: bool, tmp_path: Path) -> None:
    task, hangs, run = tmp_path / "my_task.py", tmp_path / "hangs", tmp_path / "run"
    task.write_text(f"BLOCKS = {blocks}\n{HANGING}")
    keys = {"policy.preset": "tiny", "hardware": "cpu", "run_dir": run, "eval.questions": 2, "rollout.groups": 2}
    keys |= {"rollout.samples": 2, "rollout.slots": 4, "rollout.swap_slots": 0, "budget.context_tokens": 64}
    keys |= {"budget.response_tokens": 8, "budget.trajectory_tokens": 128}
    flags = [f"--config=configs/blank.py:{task}:hanging", *(f"--config.{key}={value}" for key, value in keys.items())]
    started = subprocess.Popen(
        [sys.executable, "-m", "experiments.train", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | UNOPTIMISED,
    )
    try:
        deadline = time.monotonic() + 300
        while not hangs.exists() and time.monotonic() < deadline and started.poll() is None:
            time.sleep(0.1)
        time.sleep(1)
        started.send_signal(signal.SIGTERM)
        output, _ = started.communicate(timeout=60)
    finally:
        started.kill()
    assert started.returncode == 0 and "the same command resumes" in output, output[-3000:]
    assert str(task) in output, "it says where the environment hangs"
    assert list((run / "checkpoints").iterdir()) and (run / "report.html").exists()
    kept = [t.group for path in run.glob("pending/*") for t in read_jsonl(path)]
    assert blocks or kept == [0, 0], "the complete group"


FEW = {
    "warm_start.updates": 1,
    "warm_start__batch": 2,
    "rollout__groups": 2,
    "rollout__samples": 2,
    "eval__questions": 2,
}
FEW |= {"warm_start__demonstrations": 8, "rollout__slots": 4, "rollout__swap_slots": 0, "rollout__prefill_rows": "(4,)"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "tools", "changes"),
    [
        ("multihop_tiny", {"search"}, FEW | {"task__multihop__corpus": "mini"}),
        ("bfcl_tiny", set(), FEW | {"rollout__groups": 1, "eval__questions": 1}),
    ],
)
def test_real_data(tmp_path: Path, data_dir: Path, config: str, tools: set[str], changes: dict[str, Any]) -> None:
    small = {"policy__head_dim": 8, "policy__width": 16, "tokenizer__texts": 1, "updates": 1, "eval__questions": 4}
    done = train(config, tmp_path / "run", task__data_dir=data_dir, **small | changes)
    assert done.returncode == 0, done.stderr[-3000:]
    page = pages.unpack((tmp_path / "run" / "report.html").read_text())
    first = next(iter(read_jsonl(tmp_path / "run" / "trajectories" / "demonstrations.jsonl.gz")))
    assert first.metrics["em"] == 1.0 and tools <= {call["name"] for call in first.steps[0].tool_calls}
    (record,) = (r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["phase"] == "rl")
    assert record["batch/tokens"] > 0
    check_metric_names(tmp_path / "run")
    for text, least in ((first.row["question"], 20), (first.steps[0].tool_calls[0]["result"], 0)):
        assert len(text) > least and json.dumps(text) in json.dumps(page[first.uid])


@pytest.mark.slow
def test_summaries_are_steps_of_a_run(tmp_path: Path) -> None:
    small = {"policy__width": 16, "policy__head_dim": 8, "updates": 1, "rollout__groups": 2, "rollout__samples": 4}
    small |= {"tokenizer__texts": 500, "warm_start__batch": 4, "warm_start__demonstrations": 8}
    small |= {"pretrain__updates": 1, "pretrain__texts": 64}
    done = train("whereabouts", tmp_path / "run", optimised=False, context__train_summary=False, **small)
    assert done.returncode == 0, done.stderr[-3000:]
    batch = list(read_jsonl(tmp_path / "run" / "trajectories" / "rl_000000.jsonl.gz"))
    summaries = [(t, place) for t in batch for place, s in enumerate(t.steps) if s.info.get("summary")]
    assert {s.context_rule for t in batch for s in t.steps} == {"summary(turns=2)"} and len(summaries) >= 16
    assert {t.steps[place].trainable for t, place in summaries} == {False}
    assert any(a for t, place in summaries for a in t.steps[place].advantages)
    (record,) = (r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["phase"] == "rl")
    assert record["learner/grad_norm"] > 0 and "rollout/summary_score" in record
    check_metric_names(tmp_path / "run")


@pytest.mark.slow
def test_a_mixture_under_a_curriculum(tmp_path: Path) -> None:
    mixed = {
        "task__name": "mixture",
        "task__mixture": "('countdown(weight=1)', 'keydoor(weight=1)')",
        "budget__max_steps": 7,
    }
    small = {"policy__width": 16, "policy__head_dim": 8, "updates": 2, "rollout__groups": 4, "rollout__samples": 2}
    small |= {"tokenizer__texts": 500, "warm_start__batch": 4, "warm_start__demonstrations": 8}
    curriculum = "('max_steps(2)', 'max_steps(7, update=1)')"
    done = train("countdown", tmp_path / "run", optimised=False, task__curriculum=curriculum, **mixed, **small)
    assert done.returncode == 0, done.stderr[-3000:]
    for update, most in ((0, 2), (1, 7)):
        batch = list(read_jsonl(tmp_path / "run" / "trajectories" / f"rl_{update:06d}.jsonl.gz"))
        assert {t.row["task"] for t in batch} == {"countdown", "keydoor"}
        assert {t.row["max_steps"] for t in batch} == {most} and max(len(t.steps) for t in batch) <= most
    evaluated = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["phase"] == "eval"]
    assert all({"eval/em_countdown", "eval/em_keydoor"} <= r.keys() for r in evaluated)
    check_metric_names(tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"credit__name": "gae"}, "unknown credit scheme 'gae'; choose one of a2tgpo, bilevel_gae, dr_grpo"),
        ({"budget__context_tokens": 70}, "the prompt of row hopworld/train/0 has"),  # The tokenizer is trained already.
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, overrides: dict, message: str) -> None:
    done = train("quickstart", tmp_path / "run", **overrides)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert len(re.findall(r"^error: ", done.stderr, re.MULTILINE)) == 1
    assert not (tmp_path / "run").exists()
