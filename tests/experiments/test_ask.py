"""Asking one question: what is shown while an agent works, which row is asked, how a run and its weights answer."""

from __future__ import annotations

import asyncio
import io
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from changes import changed
from programs import program
from rich.console import Console
from small_runs import ROOT, train

from agentr1_jax.agents.session import Identity, ScriptedSession
from agentr1_jax.errors import UserError
from agentr1_jax.notebook import load_policy
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.tasks import make_task
from agentr1_jax.tasks.hopworld.task import NO_FLAWS
from agentr1_jax.train import build
from agentr1_jax.trajectory import Outcome, Trajectory
from configs import quickstart
from experiments.evaluation import policies
from experiments.setup import read_settings, with_weights

SAID = ["[red]so[/red] <tool_call>{</tool_call>", "hm", "<answer> :smile: </answer>"]
ask, credit_compare, export_hf = map(program, ("ask", "credit_compare", "export_hf"))
TASK = make_task("hopworld", top_k=2, flaws=NO_FLAWS)


@pytest.fixture(scope="session")
def agent(tmp_path_factory):
    config = quickstart.get_config()
    config.run_dir, config.tokenizer.texts = str(tmp_path_factory.mktemp("ask")), 400
    settings = read_settings(config)
    return build.make_agent(settings, TASK, build.make_tokenizer(settings, TASK, resumes=False))


def play(agent, row, expert, shown=None):
    """The trajectory of an expert, and what a console shows of it where there is one."""
    session = ScriptedSession(Identity("u", 0, 0, TASK.name, 0), expert, agent.tokenizer)
    asyncio.run((agent if shown is None else ask.AgentDisplay(agent, shown)).run(session, row))
    return session.trajectory()


def console():
    return Console(file=io.StringIO(), soft_wrap=True, width=40)


def test_steps_are_shown_in_order_and_change_nothing(agent):
    row, shown = TASK.row("eval", 3), console()
    trajectory = play(agent, row, TASK.expert(row, 0), shown)
    plain = play(agent, row, TASK.expert(row, 0))
    assert [s.response_ids.tolist() for s in trajectory.steps] == [s.response_ids.tolist() for s in plain.steps]
    text = shown.file.getvalue()
    at = 0
    for step in trajectory.steps:
        said = agent.tokenizer.decode(step.response_ids[:-1]).strip()
        for part in (
            f"Agent: {said}\n",
            *(f"Call: search(query={c['arguments']['query']!r})\n" for c in step.tool_calls),
        ):
            at = text.index(part, at) + len(part)
        for call in step.tool_calls:
            at = text.index(f"Result: {call['result']}\n", at)
    assert len(trajectory.steps) > 1 and "reward" not in text and "<|im_end|>" not in text
    answer = dict(ask.conclusion(trajectory, row, agent.tokenizer))
    assert answer == {"Answer": row["answers"][0], "Gold answer": f"{row['answers'][0]} (right)"}


def test_a_response_is_shown_before_its_tools_have_answered(agent):
    """Also: what an agent says is no markup, and calls that cannot be read are shown as such."""
    script, shown, seen = iter(SAID), console(), []

    def expert(observation):
        seen.append(shown.file.getvalue())
        return next(script)

    row = ask.free_row(TASK, "Who?", None)
    trajectory = play(agent, row, expert, shown)
    assert seen[0] == "" and "Agent: [red]so[/red]" in seen[1] and "Call: (not readable)\nResult: Error: the" in seen[1]
    assert seen[2].endswith("Environment: Error: neither a tool call nor an answer.\n")
    assert dict(ask.conclusion(trajectory, row, agent.tokenizer)) == {"Answer": ":smile:"}


def test_a_terminal_does_not_obey_what_a_model_or_a_tool_says():
    shown = console()
    ask.show(shown, "Result", "\x1b]0;owned\x07 one\n\x1b[2Jtwo")
    assert shown.file.getvalue() == "Result: \ufffd]0;owned\ufffd one\n\ufffd[2Jtwo\n"


def test_how_an_episode_ended_without_an_answer(agent):
    row = TASK.row("eval", 0)
    cut = play(agent, row, lambda observation: "so " * 200)
    assert dict(ask.conclusion(cut, row, agent.tokenizer)) == {
        "Answer": "none (response_truncated)",
        "Gold answer": f"{row['answers'][0]} (wrong)",
    }
    long = ask.free_row(TASK, "word " * 400, None)
    with pytest.raises(UserError, match=r"no room for a response in budget\.context_tokens; ask a shorter one"):
        list(ask.conclusion(play(agent, long, lambda observation: ""), long, agent.tokenizer))
    broken = Trajectory("u", 0, 0, "t", 0, (), Outcome.ENV_FAILURE, info={"error": "OSError: gone"})
    with pytest.raises(UserError, match=r"the episode failed \(env_failure\): OSError: gone"):
        list(ask.conclusion(broken, row, agent.tokenizer))


def test_which_row_is_asked():
    assert ask.task_row(TASK, "eval/5", "question_row") == TASK.row("eval", 5)
    assert ask.free_row(TASK, "Who?", None) == {"id": "asked", "question": "Who?", "answers": [], "world": "eval/0"}
    assert ask.free_row(TASK, "Who?", "dev/3")["world"] == "dev/3"
    for wrong in ("eval", "eval/", "/3", "eval/-1", "eval/x"):
        with pytest.raises(UserError, match=f"--question_row={wrong}: write SPLIT/NUMBER"):
            ask.task_row(TASK, wrong, "question_row")
        with pytest.raises(UserError, match=f"--world={wrong}: write SPLIT/NUMBER"):
            ask.free_row(TASK, "Who?", wrong)
    with pytest.raises(UserError, match="--question_row=test/1: hopworld has no row 'test' 1; splits are"):
        ask.task_row(TASK, "test/1", "question_row")
    with pytest.raises(UserError, match="--world=test/1: hopworld has no row"):
        ask.free_row(TASK, "Who?", "test/1")


def test_what_the_world_does_not_have_is_told_with_what_it_can_be_asked():
    known = TASK.row("eval", 16)  # Of the world eval/1.
    said = dict(ask.describe_world(TASK, known))
    assert list(said) == ["World"] and said["World"].startswith("eval/1 of hopworld, ")
    row = ask.free_row(TASK, "Who directed Jaws, and is Emil Nobody its composer?", "eval/1")
    said = dict(ask.describe_world(TASK, row))
    assert said["Not in this world"].startswith("Jaws, Emil Nobody; it can be asked: ")
    assert all(TASK.row("eval", 16 + i)["question"] in said["Not in this world"] for i in range(3))
    for index in range(16, 32):
        assert list(dict(ask.describe_world(TASK, TASK.row("eval", index)))) == ["World"]


def test_weights_are_asked_in_their_own_shape():
    config = quickstart.get_config()
    config.policy.width, config.policy.qk_norm, config.policy.lora.rank, config.policy.dtype = 48, True, 4, "bfloat16"
    config = with_weights(config, "owner/name")
    policy = config.policy.to_dict()
    assert policy.pop("weights") == config.tokenizer.path == "owner/name"
    assert policy.pop("lora")["rank"] == 0 and policy.pop("dtype") == "bfloat16"
    assert policy.pop("yarn")["factor"] == 1 and policy.pop("precision") == "default"
    assert {key for key, value in policy.items() if value} == {"param_dtype"}
    settings = build.fit_devices(ask.reduce_to_one_slot(read_settings(config)))
    assert settings.engine.slots * settings.rollout.tensor == 8 and settings.engine.swap_slots == 0


def test_a_wrong_index_is_told_before_anything_is_loaded(tmp_path, monkeypatch):
    """Inside the episode it would be a failure of the environment."""

    def broken():
        raise UserError("task.multihop.retriever: the index is of another corpus")

    config = quickstart.get_config()
    config.run_dir = str(tmp_path)
    RunFolder(str(config.run_dir)).write_config(configs.resolve(config))
    task = types.SimpleNamespace(name="multihop", env=broken)
    monkeypatch.setattr(ask, "make_task", lambda *_, **__: task)
    for flag in ("CONFIG", "QUESTION_ROW", "WORLD"):
        monkeypatch.setattr(ask, flag, types.SimpleNamespace(value=None))
    with pytest.raises(UserError, match="the index is of another corpus"):
        ask.main(["ask", str(tmp_path), "Who?"])


@pytest.fixture
def foreign(tmp_path):
    """Folder of a run that brings a Python file, which says that it was executed, and then stops."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n1 / 0\n")
    config = changed(quickstart, run_dir=str(run), credit__file=str(run / "evil.py"))
    RunFolder(str(run)).write_config(configs.resolve(config))
    return run


def is_executed(run, read):
    """Whether a program executed the file of a run; all refuse what comes after."""
    with pytest.raises(UserError, match=r"credit\.file: .*evil\.py") as caught:
        read(str(run))
    return (run.parent / "executed").exists(), str(caught.value)


READERS = {
    "ask": ask.read_run_settings,
    "credit_compare": lambda run: credit_compare.main(["", run]),
    "evaluate": lambda run: read_settings(policies.find_config(None, run)),
    "export_hf": lambda run: export_hf.export(run, f"{run}_out"),
    "notebook": load_policy,
}


@pytest.mark.parametrize("reader", READERS)
def test_python_that_a_run_brings_is_not_executed_unasked(foreign, monkeypatch, reader):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # No terminal.
    executed, told = is_executed(foreign, READERS[reader])
    assert not executed and ('credit={"file": ...}' if reader == "notebook" else "--trust_run") in told


def test_python_of_the_working_directory_is_executed_unasked(foreign, monkeypatch):
    monkeypatch.chdir(foreign.parent)
    own = (foreign / "evil.py").rename("evil.py")
    config = changed(quickstart, run_dir=str(foreign), credit__file=str(own.absolute()))
    RunFolder(str(foreign)).write_config(configs.resolve(config))
    assert is_executed(foreign, ask.read_run_settings)[0]


@pytest.mark.parametrize("answer", ["y\n", "n\n", "\n", ""])
def test_python_that_a_run_brings_is_executed_if_one_agrees(foreign, monkeypatch, capsys, answer):
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda *_: next(iter([answer.strip()])) if answer else exec("raise EOFError"))
    assert is_executed(foreign, ask.read_run_settings)[0] == (answer == "y\n")
    assert f"credit.file: {foreign / 'evil.py'}" in capsys.readouterr().err


def test_python_that_a_run_brings_is_executed_by_the_flag_or_if_it_is_named(foreign, monkeypatch):
    monkeypatch.setattr(configs, "trusts_run", lambda: True)
    assert is_executed(foreign, ask.read_run_settings)[0]
    (foreign.parent / "executed").unlink()
    named = {"credit": {"file": str(foreign / "evil.py")}}
    assert is_executed(foreign, lambda run: load_policy(run, **named))[0]


def run_ask(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "experiments.ask", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def read_error(done: subprocess.CompletedProcess) -> str:
    """The one line of an error."""
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stdout == ""
    assert len(re.findall(r"^error: ", done.stderr, re.MULTILINE)) == 1
    return done.stderr[done.stderr.index("error: ") :].rstrip("\n")


def test_bad_input_is_one_line():
    line = read_error(run_ask("nowhere", "Who?"))
    assert "nowhere: no run (it has no config.json)" in line and "\n" not in line
    assert line.endswith("to ask published weights, name their task with --config=FILE")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "RUN_OR_WEIGHTS is missing; the command takes RUN_OR_WEIGHTS [QUESTION]"),
        (("nowhere", "Who?", "--question_row=eval/1"), "give either a question"),
    ],
)
def test_each_bad_input_is_one_line(arguments, message):
    line = read_error(run_ask(*arguments))
    assert message in line and "\n" not in line


@pytest.mark.slow
def test_a_run_and_its_exported_weights_answer_alike(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "weights"
    assert train("quickstart", run, eval__every=0, updates=1).returncode == 0
    done = run_ask(run, "--question_row=eval/5")
    assert done.returncode == 0, done.stderr[-3000:]
    row = make_task("hopworld").row("eval", 5)
    assert done.stdout.startswith(f"Question: {row['question']}\n")
    assert re.search(
        rf"^Answer: .+\nGold answer: {re.escape(row['answers'][0])} \((right|wrong)\)\n\Z", done.stdout, re.M
    )
    assert done.stdout.count("Agent") >= 1
    export = [sys.executable, "-m", "experiments.export_hf", str(run), str(out)]
    subprocess.run(export, cwd=ROOT, check=True, capture_output=True, timeout=300)
    assert run_ask(out, "--question_row=eval/5", "--config=configs/quickstart.py").stdout == done.stdout
    assert "to ask published weights" in read_error(run_ask(out, "Who?"))
    for checkpoint in (run / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    assert "has no checkpoint yet" in read_error(run_ask(run, "Who?"))
