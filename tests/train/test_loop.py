"""The training loop in one process: a small run, stopped and resumed, against one that never stopped."""

from __future__ import annotations

import collections
import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pages
import pytest
from programs import program
from small_runs import check_metric_names, small_config

from agentr1_jax.errors import UserError
from agentr1_jax.runtime.metrics import read_metrics
from agentr1_jax.runtime.processes import StopRequest
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.train import phases
from agentr1_jax.trajectory import Outcome
from agentr1_jax.trajectory_io import read_jsonl, to_json
from experiments.setup import make_setup, read_settings

train = program("train")
RUN = {
    "pretrain.updates": 3,
    "pretrain.texts": 40,
    "pretrain.batch": 8,
    "warm_start.updates": 2,
    "warm_start.demonstrations": 8,
    "warm_start.batch": 4,
    "updates": 3,
    "critic": "none",
    "credit.name": "remax",
    "credit.args.lam": None,
    "kl.kind": "k1",
    "kl.where": "reward",
    "kl.coef": 0.1,
    "kl.target": 0.01,
    "kl.horizon": 16.0,
    "loss.ratio": "trajectory",
    "shaping.scale_returns": True,
    "learner.old_logprobs": "learner",
    "learner.packing": "prefix_tree",
    "learner.minibatches": 2,
    "correction.kind": "tis_sequence",
    "optimizer.name": "lion",
    "optimizer.schedule": "cosine",
    "rollout.deterministic": True,
    "rollout.dynamic_sampling_groups": 2,
    "rollout.prefill_rows": (8,),
    "rollout.swap_slots": 0,
    "eval.questions": 4,
    "eval.quick_questions": 2,
    "tokenizer.texts": 200,
}
EXACT = ("phase", "update", "learner/loss", "learner/lr", "learner/kl_coef", "learner/ref_kl", "learner/max_ratio")
EXACT += ("gap/max", "batch/dynamic_sampling_groups", "rollout/reward", "eval/reward", "eval/response_tokens")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Setup and state builder of both runs, on one device."""
    folder = tmp_path_factory.mktemp("parts")
    config = small_config(folder).copy_and_resolve_references()
    config.update_from_flattened_dict(RUN)
    (device, *_) = jax.devices()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda: [device])
        return make_setup(read_settings(config), resumes=False)


def start(parts: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, stop_at: str = "") -> Any:
    """Start a run in a folder, or resume it; ask it to stop at a train step (`rl 2`) or after an evaluation.

    Returns setup, and the progress that it began with and ended with.
    """
    setup, builder = parts
    run = dataclasses.replace(setup.settings.run, run_dir=str(folder))
    setup = dataclasses.replace(setup, settings=dataclasses.replace(setup.settings, run=run))
    RunFolder(str(folder)).write_config({"updates": run.updates})
    update, evaluate = train.train_step.update, train.evaluate
    with train.open_run(setup.settings, builder, {}, time.perf_counter()) as (logger, state, begin):

        def update_and_stop(setup: Any, phase: Any, state: Any, *rest: Any) -> Any:
            done[phase.name] += 1
            logger.stop.requested |= stop_at == f"{phase.name} {done[phase.name]}"
            return update(setup, phase, state, *rest)

        def evaluate_and_stop(setup: Any, state: Any, progress: Any, logger: Any, name: str, *rest: Any) -> Any:
            means = evaluate(setup, state, progress, logger, name, *rest)
            logger.stop.requested |= stop_at == name
            return means

        done = collections.Counter({begin.phase: begin.update})
        with monkeypatch.context() as patch:
            patch.setattr(train.train_step, "update", update_and_stop)
            patch.setattr(train, "evaluate", evaluate_and_stop)
            return setup, begin, train.train(setup, builder, state, begin, logger)


def test_progress_is_told_in_words() -> None:
    said = train.progress_text({"learner/logprob": -0.41, "time/learn": 0.5, "time/learner_tokens": 1000.0}, {})
    assert said == "loss 0.41: each token is foreseen with probability 0.66; tokens/s: 2,000 learned"
    record = {"rollout/reward": 0.934, "rollout/em": 0.62, "rollout/em_bridge2": 0.9, "rollout/em_comparison": 0.25}
    said = train.progress_text(record, {"em_before_sampled": 0.36})
    assert said == "reward 0.93, right answers 0.62 (0.36 before), of comparison 0.25"
    assert train.progress_text({"rollout/reward": 0.5}, {}) == "reward 0.50"


class Failing:
    """Environments of a task of which every `every`-th fails in its first step; with `hold` it blocks first."""

    def __init__(self, task: Any, every: int, hold: threading.Event | None = None) -> None:
        self.made, self.task, self.every, self.hold = 0, task, every, hold

    def __call__(self) -> Any:
        env, self.made = self.task.env(), self.made + 1
        if self.made % self.every == 0:
            env.step = self.step
        return env

    async def step(self, action: Any) -> Any:
        if self.hold:
            self.hold.wait()
        raise SystemExit("of the environment")


def test_demonstrations_that_fail_are_told_and_a_stop_waits_for_none(
    parts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    setup, _ = parts
    stop = StopRequest()

    def demonstrations(**failing: Any) -> Any:
        agent = dataclasses.replace(setup.agent, make_env=Failing(setup.task, **failing))
        return phases.make_demonstrations(dataclasses.replace(setup, agent=agent), stop)

    whole = phases.make_demonstrations(setup, stop)
    made = demonstrations(every=3)
    assert [t.outcome is Outcome.ENV_FAILURE for t in made] == [i % 3 == 2 for i in range(8)]
    assert "2 of 8 demonstrations failed, the first one as env_failure: SystemExit: of the environment" in caplog.text
    assert [to_json(t) for i, t in enumerate(made) if i % 3 < 2] == [
        to_json(t) for i, t in enumerate(whole) if i % 3 < 2
    ]
    with pytest.raises(UserError, match="8 of 8 demonstrations failed"):
        demonstrations(every=1)
    hold, stop.requested = threading.Event(), True
    assert demonstrations(every=1, hold=hold) is None
    hold.set()


def records(folder: Path) -> list[tuple[Any, ...]]:
    """What must not depend on stops, of every record of metrics."""
    return [tuple(r.get(key) for key in EXACT) for r in read_metrics(folder / "metrics.jsonl")]


def prompts(folder: Path, update: int) -> list[int]:
    """Prompt indices of an RL batch, those of replaced groups included."""
    batch = list(read_jsonl(folder / "trajectories" / f"rl_{update:06d}.jsonl.gz"))
    assert any(s.advantages is not None for t in batch for s in t.steps)
    return sorted({int(t.uid.split("/")[1]) for t in batch})


def test_a_run_that_stops_and_resumes_is_the_run_that_never_stopped(
    parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    straight, resumed = tmp_path / "[red]straight", tmp_path / "resumed"
    setup, _, whole = start(parts, straight, monkeypatch)
    reports: list[str] = []
    for place, stop_at in (
        (("pretraining", 0), "pretraining 2"),
        (("pretraining", 2), "eval_000001"),  # It stops while the second batch is sampled.
        (("rl", 1), "rl 2"),  # It does not evaluate again.
        (("rl", 2), ""),
    ):
        _, begin, end = start(parts, resumed, monkeypatch, stop_at)
        assert (begin.phase, begin.update) == place
        reports.append((resumed / "report.html").read_text() if stop_at else "")
    phases = [phase for phase, *_ in records(straight)]
    assert phases.count("rl") == 3 and phases.count("eval_sampled") == 2
    # Every RL batch is logged, imitation at its end; evaluations are before RL, at updates 1 and 2, after RL.
    assert [p for p in phases if p in ("pretraining", "warm_start")] == ["pretraining", "warm_start"]
    assert [update for phase, update, *_ in records(straight) if phase == "eval"] == [0, 1, 2, 3]
    assert records(resumed) == records(straight)
    assert end.prompt_index == whole.prompt_index > 3 * 4, "no group was replaced"
    used = [prompts(straight, update) for update in range(3)]
    assert sum(used, []) == list(range(whole.prompt_index))
    assert [prompts(resumed, update) for update in range(3)] == used

    shown = [{t["uid"].split("/")[0] for t in pages.island(page)["trajectories"]} for page in reports[:3]]
    assert shown[0] == set() and "rl" in shown[2] and {"eval_000001"} < shown[1], "a stop leaves a report"

    check_metric_names(straight, everything=True)
    train.write_summary(setup, whole)
    assert f"Look at {straight}/report.html and " in capsys.readouterr().out
    summary = json.loads((straight / "summary.json").read_text())
    assert {"f1_after_greedy", "seconds", "updates"} <= set(summary)
    means = [key for key in summary if key.startswith(("em_before", "em_after"))]
    assert means == ["em_before_greedy", "em_after_greedy", "em_before_sampled", "em_after_sampled"]  # In pairs.
    assert 0 < summary["warm_start_seconds"] < summary["seconds"]
    assert summary["recompiles_after_warmup"] == 0
    assert all((straight / name).stat().st_size for name in ("report.html", "learning_curve.png", "timeline.png"))


def test_the_last_update_of_a_phase_that_ends_by_time_is_logged(
    parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = train.elapsed_share

    def time_is_up(settings: Any, phase: Any, progress: Any, seconds: float) -> float:
        return progress.update if phase.name == "warm_start" else share(settings, phase, progress, seconds)

    monkeypatch.setattr(train, "elapsed_share", time_is_up)
    start(parts, tmp_path / "run", monkeypatch, stop_at="eval_before_greedy")
    assert ("warm_start", 1) in [record[:2] for record in records(tmp_path / "run")]


def test_updates_that_are_skipped_or_missing_end_a_run_in_time() -> None:
    train.check_updates({"learner/skipped_in_a_row": 2.0}, 9)
    for skipped, empty, match in ((3.0, 0, "3 updates in a row were not finite"), (0.0, 10, "10 batches in a row")):
        with pytest.raises(UserError, match=match):
            train.check_updates({"learner/skipped_in_a_row": skipped}, empty)


@pytest.mark.slow
def test_a_policy_that_is_not_finite_ends_the_run(parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In imitation by its first update that counts for nothing, in RL by batches without a usable trajectory."""
    setup, builder = parts

    def init() -> Any:
        state = builder.init()
        return dataclasses.replace(state, params=jax.tree.map(lambda x: x * jnp.nan, state.params))

    spoilt = dataclasses.replace(builder, init=init)
    monkeypatch.setattr(train, "MOST_EMPTY", 2)
    for updates, (batches, match) in enumerate([(2, "2 batches in a row"), (1, "pretraining came to its end")]):
        c = setup.settings
        settings = dataclasses.replace(
            c,
            pretrain=dataclasses.replace(c.pretrain, updates=updates),
            warm_start=dataclasses.replace(c.warm_start, updates=0),
        )
        run = tmp_path / str(updates)
        with pytest.raises(UserError, match=match):
            start((dataclasses.replace(setup, settings=settings), spoilt), run, monkeypatch)
        records = list(read_metrics(run / "metrics.jsonl"))
        assert sum(r["phase"] in ("rl", "pretraining") for r in records) == batches
