"""Playing a task by hand: what is typed, which faults of a task are found, and the whole task of the guide."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import itertools
import re
import sys
import types

import checkpoints
import numpy as np
import pytest
from programs import program
from test_readme import block

from agentr1_jax.envs.base import Action, Observation, Transition
from agentr1_jax.envs.datasets import RowsTask
from agentr1_jax.errors import UserError
from agentr1_jax.text.tool_calls import render_answer, render_call
from agentr1_jax.trajectory import Outcome
from experiments import task_checks

try_task = program("try_task")
pytestmark = pytest.mark.usefixtures("user_files")
INTEGER = {"type": "object", "properties": {"number": {"type": "integer"}, "why": {"type": "string"}}}
TOOLS = {"compare": INTEGER, "search": {"properties": {"query": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("compare number=50 why=it is the middle", render_call("compare", {"number": 50, "why": "it is the middle"})),
        ("search query='Pale River'", render_call("search", {"query": "Pale River"})),
        ("search who's there", render_call("search", {"query": "who's there"})),
        ("search", render_call("search", {})),
        ('{"name": "compare", "arguments": {"number": "x"}}', render_call("compare", {"number": "x"})),
        ("answer  Old Kent", render_answer("Old Kent")),
        ("left", "left"),
        ("{oops", "{oops"),
    ],
)
def test_what_is_typed_is_a_call_an_answer_or_sent_as_it_is(line, said):
    assert try_task.read_line(line, TOOLS) == said
    assert try_task.read_line("answer 7", {}) == "answer 7"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the command on the whole task of the guide, perhaps changed; its status and what it printed."""

    def start(*, changes=(), typed=None, name="my_tasks.py:guess", **flags):
        text = block("A whole task", most=60)
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "my_tasks.py").write_text(text, encoding="utf-8")
        for flag, value in {"CONFIG": None, "ROW": "eval/3", "BY": "expert", "TEMPERATURE": 1.0, "SEED": 0}.items():
            monkeypatch.setattr(try_task, flag, types.SimpleNamespace(value=flags.get(flag.lower(), value)))
        monkeypatch.setattr(try_task, "use_compile_cache", lambda settings: None)
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        status = try_task.main(["try_task", str(tmp_path / name)])
        return status, capsys.readouterr().out

    return start


def test_the_whole_task_of_the_guide_passes_by_its_expert_and_at_the_keyboard(run):
    status, shown = run()
    assert status == 0 and "all checks passed" in shown and "answered after 8 steps, return 1, em 1" in shown
    typed = 'compare number=50\n{"name": "compare", "arguments": {}}\nhm\nanswer 7\n'
    status, shown = run(by="keyboard", typed=typed)
    assert status == 0 and "Call: compare(number=50)\nResult: smaller" in shown
    assert "Tool: compare: Tells whether" in shown and "Which is it, from 0 to 99?" in shown
    assert "bad arguments for compare: 'number' is a required property" in shown
    assert "answered after 4 steps, return 1, em 1" in shown
    status, shown = run(by="keyboard", typed="compare 5\n")
    assert status == 0 and "-- episode: left by the player" in " ".join(shown.split())


def test_mistakes_in_the_command_and_weights_that_play(run, tmp_path):
    with pytest.raises(UserError, match="--row=test/1: "):
        run(row="test/1")
    with pytest.raises(UserError, match="nothing.py: no such file"):
        run(name="nothing.py:guess")
    weights = checkpoints.write_model(tmp_path / "model")
    config = try_task.blank.get_config("countdown")
    assert config.task.name == "countdown"
    settings = try_task.read_player(config, weights)
    assert settings.tokenizer.path == weights == settings.policy.weights and settings.engine.slots % 8 == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([('"required": ["number"]', '"required": ["nummer"]')], "FAIL tools: compare: parameters must be of type obj"),
        ([('"type": "integer"', '"type": "int"')], "FAIL tools: compare: parameters are no JSON Schema"),
        ([("description = \"compare\", \"Tells whether the secret number is larger or smaller than this one.\"",
           "description = \"compare\", \"\"")], "FAIL tools: compare has no description"),
        ([('["answer"], expert', '["other"], expert')], "FAIL rewards: step 1: reward_parts of the task leave"),
        ([("return f\"{row['id']}: {[result.content for turn in turns for result in turn.results]}\"", "return 'one'")],
         "FAIL state keys: all 8 states share the key 'one'"),
        ([("return f\"{row['id']}: ", "import time; return f\"{time.time_ns()}: ")], "FAIL state keys: equal"),
        ([("[run.wrap(Compare", "[(Compare")], "-- time limit: compare is not put through run.wrap(tool)"),
        ([('"equal" if', '1 / 0 if')], "FAIL episode: "),
        ([('"equal" if', 'exec("raise OSError(chr(27) + \'[2J\')") if')], "OSError: \ufffd[2J"),
    ],
)  # fmt: skip
def test_faults_of_a_task_are_found(run, changes, message):
    status, shown = run(changes=changes)
    assert message in " ".join(shown.split()) and status == ("FAIL" in shown)
    assert "\x1b" not in shown


@dataclasses.dataclass
class Env:
    """Pays `rewards` in turn, and says what `says` makes; ends after two steps."""

    rewards: object
    says: object = "hm"

    async def reset(self, row, seed):
        self.steps = 0
        return Observation(messages=[{"role": "user", "content": "?"}], state_key="0")

    async def step(self, action):
        self.steps += 1
        reward, parts = next(self.rewards)
        if self.steps == 2:
            return Transition(None, reward, parts, terminated=True, outcome=Outcome.ANSWERED)
        said = self.says if isinstance(self.says, str) else next(self.says)
        return Transition(Observation(text=said, state_key=str(self.steps)), reward, parts)

    def truncate(self):
        return {}


def verdicts(make_env):
    task = RowsTask("t", {"train": [{"id": "0"}]}, make_env, ["a"])
    actions = [Action(np.zeros(1, np.int32), "x")] * 2
    played = asyncio.run(task_checks.replay(task.env(), task.row("train", 0), 0, actions))
    found = task_checks.check_task(task, task.row("train", 0), 0, played, lambda wrap: task)
    return {v.name: (v.ok, v.detail) for v in found}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ((1.0, {"a": 0.5}), r"step 1: its parts \{'a': 0.5\} do not sum to its reward 1"),
        ((float("nan"), {}), "step 1: reward is nan; it must be a finite number"),
        ((None, {}), "step 1 has no reward"),
        ((0.5, {"b": 0.5}), "step 1: reward_parts of the task leave out b"),
    ],
)
def test_rewards_that_cannot_be_trained_on_are_found(reward, message):
    assert verdicts(lambda: Env(itertools.repeat((0.5, {"a": 0.5}))))["rewards"] == (True, "0.5, 0.5; parts: a")
    ok, detail = verdicts(lambda: Env(itertools.repeat(reward)))["rewards"]
    assert ok is False and re.search(message, detail)


def test_what_differs_under_one_seed_is_found():
    paid = itertools.count()
    found = verdicts(lambda: Env((float(next(paid)), {}) for _ in range(2)))
    assert found["determinism"] == (False, "step 1: the same actions have the reward 0.0 and 2.0")
    said = map(str, itertools.count())
    found = verdicts(lambda: Env(itertools.repeat((0.0, {})), said))
    assert found["determinism"] == (False, "step 1: the same actions have other observations")
    assert found["tools"][0] is None and found["time limit"][0] is None
