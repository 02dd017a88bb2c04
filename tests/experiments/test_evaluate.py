"""Evaluation of a run of random parameters, end to end: chunks, resuming, what is refused, what is compiled."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from programs import program
from rich.console import Console
from stored_runs import store_run

from agentr1_jax.agents.session import Identity, ScriptedSession
from agentr1_jax.errors import UserError
from agentr1_jax.policy.params import join, merge_adapters
from agentr1_jax.text.sentencepiece import train_sentencepiece
from agentr1_jax.text.tool_calls import render_call
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build
from agentr1_jax.train.restore import make_reference
from agentr1_jax.trajectory import Outcome
from agentr1_jax.trajectory_io import read_jsonl, write_jsonl
from configs import keydoor, quickstart
from experiments.evaluation import chunks, modes, policies
from experiments.evaluation import run as evaluation_run
from experiments.evaluation.run import Request
from experiments.setup import change_config, make_task, read_run, read_settings

export_hf = program("export_hf")
ROOT = Path(__file__).parent.parent.parent
MODES = ["agent", "base", "rag"]
FIGURES = ("evaluation.json", "evaluation.md", "scores.jsonl.gz")
SMALL = {
    "warm_start.updates": 0,
    "policy.layers": 1,
    "rollout.slots": 8,
    "rollout.prefill_rows": (8,),
    "rollout.deterministic": True,
    "budget.response_tokens": 12,
}


@pytest.fixture(scope="module", autouse=True)
def one_engine():
    """All evaluations share compiled programs, as the modes of one do."""
    engines, make = {}, build.make_engine

    def shared(settings, policy, mesh, dispatcher):
        key = (policy, settings.engine, mesh)
        engines[key] = engines.get(key) or make(settings, policy, mesh, dispatcher)
        return engines[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_engine", shared)
        yield


def task_of(config):
    return make_task(read_settings(config), ToolMetrics())


def text(path):
    return Path(path).read_text("utf-8")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    store_run(folder, **SMALL)
    return str(folder)


def run_evaluation(source, **request):
    """What the console shows of an evaluation, and the number of programs compiled after its first chunk."""
    console = Console(file=io.StringIO(), width=200)
    asked = {"modes": MODES, "questions": 6, "chunk": 4, **request}
    recompiles = evaluation_run.evaluate(None, source, Request(**asked), console)
    return console.file.getvalue(), recompiles


def contents(out):
    """Every file of an evaluation but the report, by name."""
    found = {}
    for folder, _, names in os.walk(out):
        for name in names:
            if name != "report.html":
                with open(os.path.join(folder, name), "rb") as file:
                    found[os.path.relpath(os.path.join(folder, name), out)] = file.read()
    return found


@pytest.fixture(scope="module")
def whole(run):
    """An evaluation from beginning to end."""
    shown, recompiles = run_evaluation(run)
    return os.path.join(run, "evaluation"), shown, recompiles


def test_every_question_is_answered_in_every_mode_by_the_same_programs(run, whole):
    out, shown, recompiles = whole
    assert recompiles == 0
    evaluation = json.loads(text(os.path.join(out, "evaluation.json")))
    assert [g["mode"] for g in evaluation["groups"]] == MODES
    for group in evaluation["groups"]:
        assert (group["split"], group["dataset"]) == ("eval", "hopworld")
        assert group["questions"] == group["trajectories"] == group["figures"]["em"]["n"] == 6
    rag = evaluation["groups"][2]["figures"]
    assert rag["tool_calls"]["mean"] == rag["steps"]["mean"] == 1.0 and rag["recall"]["mean"] > 0
    policies_of = evaluation["request"]["policies"]
    assert policies_of["agent"] != policies_of["base"] == policies_of["rag"]
    assert evaluation["request"]["sources"] == {
        "agent": f"{run}, checkpoint 3",
        "base": "initial parameters, seed 0",
        "rag": "initial parameters, seed 0",
    }
    assert evaluation["config"]["task"]["name"] == "hopworld" and "jax" in evaluation["versions"]
    for mode in MODES:
        folder = os.path.join(out, "trajectories", mode, "eval")
        read = [t for number in range(2) for t in read_jsonl(f"{folder}/{number:05}.jsonl.gz")]
        assert [t.uid for t in read] == [f"eval_{mode}/eval/{i:06}/0" for i in range(6)]
        assert all(t.row["gold_ids"] and t.row["dataset"] == "hopworld" and t.row["mode"] == mode for t in read)
    first = [list(read_jsonl(os.path.join(out, "trajectories", mode, "eval", "00000.jsonl.gz"))) for mode in MODES]
    seeds = [[t.seed for t in of_mode] for of_mode in first]
    assert seeds[0] == seeds[1] == seeds[2] and len(set(seeds[0])) == 4
    assert "gold recall" in shown and "evaluation.md" in shown
    assert text(os.path.join(out, "report.html")).count("eval_rag/eval/000000/0") >= 1


def test_a_broken_off_evaluation_goes_on_with_what_is_missing(run, whole, tmp_path, monkeypatch):
    out, straight = str(tmp_path / "out"), contents(whole[0])
    answer, asked = evaluation_run.answer, []

    def count(chunk, *rest):
        asked.append((chunk.mode, chunk.rows))
        return answer(chunk, *rest)

    def stopping(chunk, *rest):
        done = count(chunk, *rest)
        if len(asked) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return done

    monkeypatch.setattr(evaluation_run, "answer", stopping)
    shown, _ = run_evaluation(run, out=out)
    assert f"stopped; the same command goes on with {out}" in shown and not os.path.exists(f"{out}/evaluation.json")
    assert len(asked) == 4  # The fourth was begun, and left no file.
    files = {name for name in contents(out) if name.startswith("trajectories")}
    left = ("agent/eval/00000", "agent/eval/00001", "base/eval/00000")
    assert files == {f"trajectories/{name}.jsonl.gz" for name in left}
    asked.clear()
    monkeypatch.setattr(evaluation_run, "answer", count)
    run_evaluation(run, out=out)
    assert asked == [("base", range(4, 6)), ("rag", range(4)), ("rag", range(4, 6))]
    assert contents(out) == straight


def test_modes_can_be_added_and_nothing_else_changed(run, whole, tmp_path):
    out = str(tmp_path / "out")
    run_evaluation(run, out=out, modes=["rag"])
    before = contents(out)
    run_evaluation(run, out=out, modes=["agent", "base"])
    assert contents(out) == contents(whole[0])
    assert all(contents(out)[name] == before[name] for name in before if "/rag/" in name)
    for change, message in (
        ({"questions": 5}, "splits.eval: 6 there, 5 here"),
        ({"seed": 1}, "config.seed: 0 there, 1 here"),
        ({"modes": ["rag"], "baselines": "checkpoint"}, "policies.rag: "),
    ):
        with pytest.raises(UserError, match=f"holds another evaluation:\n.*{message}"):
            run_evaluation(run, out=out, **change)
    assert contents(out) == contents(whole[0])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    with pytest.raises(UserError, match="not empty, and no evaluation"):
        run_evaluation(run, out=str(tmp_path / "other"), modes=["agent"])


def test_samples_are_drawn_and_counted(run, tmp_path):
    out = str(tmp_path / "out")
    run_evaluation(run, out=out, modes=["agent"], questions=3, samples=2, temperature=1.0)
    (group,) = json.loads(text(f"{out}/evaluation.json"))["groups"]
    assert group["trajectories"] == 6 and {"pass@1", "pass@2"} <= group["figures"].keys()
    said = [t.steps[0].response_ids.tolist() for t in read_jsonl(f"{out}/trajectories/agent/eval/00000.jsonl.gz")]
    assert said[0] != said[1]


def test_a_damaged_file_is_named_and_failures_of_the_infrastructure_are_counted_apart(run, whole, tmp_path):
    out = str(tmp_path / "out")
    shutil.copytree(whole[0], out)
    path = f"{out}/trajectories/agent/eval/00001.jsonl.gz"
    first, second = read_jsonl(path)
    with open(path, "r+b") as file:
        file.truncate(40)
    with pytest.raises(UserError, match=r"00001\.jsonl\.gz, line 1: not a trajectory .*delete or repair the file, and"):
        run_evaluation(run, out=out, modes=["agent"])
    chunk = chunks.Chunk("agent", "eval", range(4, 6), path)
    broken = type(first)(first.uid, 4, 0, "hopworld", 0, (), Outcome.ENV_FAILURE, info={"error": "gone"})
    row = {"id": first.row["id"], "answers": ["x"]}
    write_jsonl(path, [chunks.with_facts(broken, chunk, row, "hopworld"), second])
    run_evaluation(run, out=out, modes=["agent"])
    group = json.loads(text(f"{out}/evaluation.json"))["groups"][0]
    assert (group["questions"], group["failed_questions"], group["figures"]["em"]["n"]) == (6, 1, 5)
    assert group["outcomes"]["env_failure"] == {"count": 1, "share": 1 / 6}
    assert "1 of 6" in text(f"{out}/evaluation.md")


def test_whose_parameters_are_meant(run, tmp_path):
    began, sources, out = evaluation_run.resolve_sources(None, run, Request(modes=["agent", "rag"]))
    assert list(sources) == [modes.TRAINED, modes.START] and out == f"{run}/evaluation"
    _, sources, _ = evaluation_run.resolve_sources(None, run, Request(modes=["agent", "rag"], baselines=modes.TRAINED))
    assert list(sources) == [modes.TRAINED]
    given = quickstart.get_config()
    with pytest.raises(UserError, match="no run there; name the trained policy by --checkpoint=RUN"):
        given.run_dir = str(tmp_path / "none")
        evaluation_run.resolve_sources(given, "", Request(modes=["agent"]))
    with pytest.raises(UserError, match="name task, tools and budget with --config=FILE"):
        evaluation_run.resolve_sources(None, str(tmp_path), Request(modes=["agent"]))
    config = quickstart.get_config()
    with pytest.raises(UserError, match="training by this config begins with a warm start of its own .* by --base=RUN"):
        policies.first_policy(config)
    with pytest.raises(UserError, match="nothing says what the training of some/weights began with; .* by --base=RUN"):
        policies.first_policy(config, source="some/weights")
    assert policies.first_policy(config, run).name == f"{run}, checkpoint 3"
    config.warm_start.init_from = run
    assert policies.first_policy(config).name == f"{run}, checkpoint 3"
    config.warm_start.init_from = str(tmp_path / "gone")
    with pytest.raises(UserError, match="which holds no run any more: name the policy"):
        policies.first_policy(config)
    config.warm_start.init_from, config.policy.weights, config.policy.preset = "", "some/weights", ""
    assert policies.first_policy(config).name == "some/weights"
    given = quickstart.get_config()
    given.budget.max_steps, given.policy.preset = 2, "small"
    config, _, _ = evaluation_run.resolve_sources(given, run, Request(modes=["agent"]))
    assert config.budget.max_steps == 2 and config.policy.layers == 1 and config.policy.preset == "tiny"
    assert given.policy.preset == "small"  # What was given stays as it was.


def test_baselines_that_cannot_be_answered_are_left_out_unless_they_were_asked_for(run, own_start, tmp_path, caplog):
    every = {"modes": modes.COMMON_MODES, "questions": 2, "out": str(tmp_path / "out")}
    with pytest.raises(UserError, match=f"{own_start} began with a warm start of its own .* by --base=RUN"):
        run_evaluation(own_start, **every)
    with caplog.at_level("WARNING", "absl"):
        run_evaluation(own_start, named=False, **every)
    assert f"left out: base, rag, react. {own_start} began with a warm start of its own" in caplog.text
    assert list(json.loads(text(tmp_path / "out" / "evaluation.json"))["request"]["policies"]) == ["agent"]
    caplog.clear()
    config, sources_of, _ = evaluation_run.resolve_sources(None, run, Request(modes=modes.COMMON_MODES, named=False))
    assert list(sources_of) == [modes.TRAINED, modes.START]
    with caplog.at_level("WARNING", "absl"):
        made = evaluation_run.set_up(config, Request(modes=modes.COMMON_MODES, named=False), modes.COMMON_MODES)
    assert list(made.agents) == MODES and "left out: react. mode react: the prompt of row" in caplog.text


@pytest.fixture(scope="module")
def own_start(tmp_path_factory):
    """A run with a warm start of its own, and without a KL term."""
    folder = tmp_path_factory.mktemp("own_start") / "run"
    store_run(folder, **{**SMALL, "warm_start.updates": 4})
    return str(folder)


def test_the_reference_of_a_kl_is_what_training_began_with(tmp_path):
    folder = str(tmp_path / "run")
    kl = {"kl.kind": "k3", "policy.lora.rank": 2, "pretrain.updates": 2}
    store_run(folder, **{**SMALL, "warm_start.updates": 4, "optimizer.name": "adamw", **kl})
    config, mesh = read_run(folder), tiny.mesh()
    settings = read_settings(config)
    with pytest.raises(UserError, match=f"{folder} began with a warm start of its own"):
        policies.first_policy(config, source=folder)
    tokenizer = build.make_tokenizer(settings, None, resumes=True)
    policy = build.make_policy(settings, tokenizer)
    params = build.make_state_builder(settings, policy, mesh).init().params
    params = {**params, "decoder": jax.tree.map(lambda x: x + 0.25, params["decoder"])}
    make_reference(settings, policy, mesh, params, first=True)
    frozen = build.make_frozen(settings, policy, mesh)
    expected = merge_adapters(policy, join({"decoder": params["decoder"]}, frozen)["decoder"])
    for gone in ("", str(tmp_path / "gone")):
        config.warm_start.init_from = gone
        source = policies.first_policy(config, source=folder)
        assert source.name == f"{folder}, reference of its KL"
        jax.tree.map(np.testing.assert_array_equal, source.load(tokenizer, mesh), expected)


def test_rl_from_another_run_began_with_what_that_run_had_learned(run, whole, tmp_path):
    folder, out = str(tmp_path / "rl"), str(tmp_path / "out")
    store_run(folder, **{**SMALL, "warm_start.init_from": run})
    run_evaluation(folder, out=out, modes=["base"], questions=2)
    request, theirs = (json.loads(text(f"{place}/evaluation.json"))["request"] for place in (out, whole[0]))
    assert request["sources"]["base"] == f"{run}, checkpoint 3"
    assert request["policies"]["base"] == theirs["policies"]["agent"]


def test_exported_weights_answer_as_their_run_does(run, whole, tmp_path):
    weights, out = str(tmp_path / "weights"), str(tmp_path / "out")
    export_hf.export(run, weights)
    config = read_run(run)
    request = Request(modes=["agent"], questions=4, chunk=4, out=out)
    evaluation_run.evaluate(config, weights, request, Console(file=io.StringIO()))
    ours, theirs = (list(read_jsonl(f"{place}/trajectories/agent/eval/00000.jsonl.gz")) for place in (out, whole[0]))
    for one, other in zip(ours, theirs, strict=True):
        assert [s.response_ids.tolist() for s in one.steps] == [s.response_ids.tolist() for s in other.steps]
    requests = [json.loads(text(f"{place}/evaluation.json"))["request"] for place in (out, whole[0])]
    assert requests[0]["policies"]["agent"] == requests[1]["policies"]["agent"]
    with pytest.raises(UserError, match=f"nothing says what the training of {weights} began with"):
        evaluation_run.resolve_sources(config, weights, Request(modes=["base"]))
    tokenizer, mesh = build.make_tokenizer(read_settings(config), None, resumes=True), tiny.mesh()
    base = policies.first_policy(config, weights)
    assert policies.hash_params(base.load(tokenizer, mesh)) == requests[0]["policies"]["agent"]
    unset = change_config(config, {"policy.dtype": None})  # It is filled before policies are compared.
    _, sources, _ = evaluation_run.resolve_sources(unset, weights, Request(modes=["base"], base=run))
    sources[modes.START].load(tokenizer, mesh)
    train_sentencepiece(["Other words than those of the other texts."] * 20, f"{weights}/tokenizer.model", 320)
    with pytest.raises(UserError, match=f"{weights} has another tokenizer than {run}/tokenizer.model"):
        base.load(tokenizer, mesh)
    os.remove(f"{weights}/tokenizer.model")
    base.load(tokenizer, mesh)  # There is nothing to compare.


def test_progress_comes_with_each_question_and_recompiling_is_told(run, tmp_path, monkeypatch, caplog):
    shown, answer = [], evaluation_run.answer

    @contextlib.contextmanager
    def noted(title, done, total, enabled):
        yield lambda now, said: shown.append((now, total))

    def compiling(*arguments):
        jax.jit(lambda x: x + len(shown))(np.ones(3, np.float32))
        return answer(*arguments)

    monkeypatch.setattr(evaluation_run, "progress_bar", noted)
    monkeypatch.setattr(evaluation_run, "answer", compiling)
    with caplog.at_level("WARNING", "absl"):
        _, recompiles = run_evaluation(run, out=str(tmp_path / "out"), modes=["agent"], questions=4, chunk=2)
    assert shown == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert recompiles > 0 and f"{recompiles} programs were compiled after warm-up" in caplog.text


def test_what_is_not_finished_is_named(run, whole, tmp_path):
    out = str(tmp_path / "out")
    shutil.copytree(whole[0], out)
    os.remove(f"{out}/trajectories/agent/eval/00001.jsonl.gz")
    run_evaluation(run, out=out, modes=["base", "rag"])
    assert "not finished: agent on eval, 4 of 6 questions answered" in text(f"{out}/evaluation.md")
    evaluation = json.loads(text(f"{out}/evaluation.json"))
    assert [g["mode"] for g in evaluation["groups"]] == ["base", "rag"]
    assert "not finished" not in text(f"{whole[0]}/evaluation.md")


def test_a_policy_of_another_shape_is_no_start(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    record = json.loads(text(other / "config.json"))
    (other / "config.json").write_text(json.dumps({**record, "policy": {**record["policy"], "width": 64}}))
    with pytest.raises(UserError, match=r"has another policy:\n  policy.width: 64 there, 32 here"):
        run_evaluation(run, out=str(tmp_path / "out"), modes=["base"], base=str(other))
    assert not (tmp_path / "out").exists()


def test_bad_requests():
    with pytest.raises(UserError, match="unknown mode 'agnet'; choose among agent, base, rag, react"):
        modes.parse_modes(["agnet"])
    with pytest.raises(UserError, match="names nothing"):
        modes.parse_modes([])
    with pytest.raises(UserError, match="all --samples of a question are the same"):
        Request(modes=["agent"], samples=2)


def test_the_task_must_fit_the_modes():
    task = task_of(keydoor.get_config())
    with pytest.raises(UserError, match="asks no questions"):
        modes.check_mode("agent", task, task.row("eval", 0))
    settings = read_settings(quickstart.get_config())
    hop = task_of(quickstart.get_config())
    for mode in MODES:
        modes.check_mode(mode, hop, hop.row("eval", 0))
    with pytest.raises(UserError, match="--splits: hopworld has no row 'test'"):
        evaluation_run.count_rows(settings, hop, Request(modes=["agent"], splits=["test"]))
    assert evaluation_run.count_rows(settings, hop, Request(modes=["agent"])) == {"eval": 256}


def test_search_more_searches_once_more_where_the_policy_first_answers(run):
    config, _, _ = evaluation_run.resolve_sources(None, run, Request(modes=["search_more"]))
    settings, task = read_settings(config), task_of(config)
    tokenizer = build.make_tokenizer(settings, task, resumes=True)
    agent = modes.make_agent("search_more", settings, task, tokenizer)
    row = task.row("eval", 0)
    said = [
        render_call("search", {"query": " one"}),
        "<answer> x </answer>",  # Dropped; what follows is the rest of a call.
        render_call("search", {"query": " two"}).split('"query": "')[1],
        "<answer> y </answer>",
    ]
    replies = iter(said)
    session = ScriptedSession(Identity("a", 0, 0, "hopworld", 0), lambda observation: next(replies), tokenizer)
    session.begin(row)
    asyncio.run(agent.run(session, row))
    steps = session.trajectory().steps
    assert [call["arguments"] for step in steps for call in step.tool_calls] == [{"query": " one"}, {"query": " two"}]
    opening = steps[1].prompt_ids[-len(agent.opening) :]
    assert tuple(opening.tolist()) == agent.opening and tokenizer.decode(opening.tolist()).endswith('"query": "')
    before = np.concatenate([steps[1].prompt_ids, steps[1].response_ids])
    np.testing.assert_array_equal(steps[2].prompt_ids[: len(before)], before)
    assert tokenizer.decode(steps[2].response_ids.tolist()).startswith(said[3]) and next(replies, None) is None


def test_react_writes_calls_in_its_format(run):
    """The prompt of ReAct has the tools, the format and the instruction; no budget of HopWorld holds it."""
    with pytest.raises(UserError, match=r"mode react: the prompt of row .* or leave react out of --modes"):
        run_evaluation(run, modes=["react"])
    config, _, _ = evaluation_run.resolve_sources(None, run, Request(modes=["react"]))
    settings, task = read_settings(config), task_of(config)
    tokenizer = build.make_tokenizer(settings, task, resumes=True)
    agent = modes.make_agent("react", settings, task, tokenizer)
    opening = asyncio.run(agent.make_env().reset(task.row("eval", 0), 0))
    prompt = tokenizer.decode(agent.render_opening(opening))
    assert "Action Input:" in prompt and modes.REACT_INSTRUCTION in prompt and '"search"' in prompt
    assert task.row("eval", 0)["question"] in prompt and "<answer>" not in prompt


@pytest.mark.slow
def test_a_killed_evaluation_goes_on(run, whole, tmp_path):
    """Started as a user starts it, killed without warning while it writes, then started again."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "experiments.evaluate", run, "--modes=agent", f"--out={out}"]
    command += ["--questions=6", "--chunk=4"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "AGENTR1_CPU_DEVICES": ""}
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    deadline = time.monotonic() + 300
    while not (out / "trajectories" / "agent" / "eval" / "00000.jsonl.gz").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    first.kill()
    first.communicate()
    assert not (out / "evaluation.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in (out / "trajectories").rglob("*.gz")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert kept and all(path.stat().st_mtime_ns == at for path, at in kept.items())
    groups = [json.loads(text(f"{folder}/evaluation.json"))["groups"] for folder in (out, whole[0])]
    ours, theirs = (of_folder[0] for of_folder in groups)
    assert ours["outcomes"] == theirs["outcomes"] and ours["figures"]["recall"] == theirs["figures"]["recall"]
