"""Environments in the form of the verifiers library: stand-ins in its published form, and the library where it is."""

from __future__ import annotations

import json
import textwrap

import letters
import pytest
from configured import configured_task
from plays import play

from agentr1_jax.contrib.verifiers import Message, VerifiersConfig, make_verifiers, tool_schemas
from agentr1_jax.envs.base import Task
from agentr1_jax.envs.registry import TaskContext
from agentr1_jax.errors import UserError
from agentr1_jax.text.tool_calls import render_call
from agentr1_jax.trajectory import Outcome
from configs import base, frozenlake

STAND_IN = """
class Rubric:
    def __init__(self, funcs, weights=None):
        self.funcs, self.weights = funcs, weights or [1.0] * len(funcs)
        self.class_objects = {"parser": str.strip}

class Env:
    system_prompt, few_shot = None, None
    def __init__(self, **fields):
        self.__dict__.update(fields)
"""
SINGLE = """
ROWS = [{"question": f"What is {i}+1?", "answer": str(i + 1), "info": {"n": i}} for i in range(16)]

async def correct(completion, answer, **kwargs):
    return 1.0 if answer in completion[-1]["content"] else 0.0

def short(completion, info, parser):
    return 1.0 / len(parser(completion[-1].content)) + 0 * info["n"]

def length(completion):
    return len(completion[0]["content"])

def load_environment(system=None, **fields):
    rubric = Rubric([correct, short, length], [1.0, 0.5, 0.0])
    return Env(**{"dataset": ROWS, "rubric": rubric, "max_turns": 1, "system_prompt": system} | fields)
"""
GAME = """
class Guess(Env):
    max_turns = 4
    async def setup_state(self, state):
        state["tries"] = 0
    def is_completed(self, MESSAGES_AND_STATE):
        return messages[-1]["content"] == "stop"
    async def env_response(self, messages, state, **kwargs):
        state["tries"] += 1
        said, right = int(messages[-1]["content"]), int(state["answer"])
        if said == right:
            FINISH
        told = [{"role": "user", "content": "higher" if said < right else "lower"}]
        return RETURNED

def won(state, completion):
    return 1.0 if state["tries"] and completion[-1].content in ("yes", "stop") else 0.0

def load_environment():
    rows = [{"prompt": [{"role": "user", "content": "guess"}], "answer": str(i)} for i in range(3)]
    return Guess(dataset=rows, eval_dataset=rows[:1], rubric=Rubric([won], [2.0]))
"""
NEW = {
    "MESSAGES_AND_STATE": "state",
    "messages[-1]": 'state["completion"][-1]',
    "FINISH": 'state["final_env_response"] = [{"role": "user", "content": "yes"}]; return state["final_env_response"]',
    "RETURNED": "told",
}
OLD = {
    "MESSAGES_AND_STATE": "messages, state",
    "FINISH": 'state["final_env_response"] = True; return [{"role": "user", "content": "yes"}], state',
    "RETURNED": "told, state",
}
TOOLS = '''
import json

def add(a: int, b: int, *, loud: bool = False) -> int:
    """Adds two numbers."""
    return a + b

class Tools(Env):
    max_turns = 5
    tools = [add]
    async def is_completed(self, messages, state, **kwargs):
        return not messages[-1].get("tool_calls")
    async def env_response(self, messages, state, **kwargs):
        out = []
        for call in messages[-1].tool_calls:
            value = {"add": add}[call.function.name](**json.loads(call.function.arguments))
            out.append({"role": "tool", "content": str(value), "tool_call_id": call.id})
        return out

def right(completion, answer):
    return float(completion[-1]["content"] == answer)

def calls(completion):
    return sum(len(m["tool_calls"]) for m in completion if m["role"] == "assistant" and m["tool_calls"])

def load_environment():
    rows = [{"question": "1+2+3?", "answer": "6"}] * 8
    return Tools(dataset=rows, rubric=Rubric([right, calls], [1.0, 0.0]))
'''


def verifiers_task(source, args=""):
    return make_verifiers(VerifiersConfig(source, args), TaskContext())


@pytest.fixture
def file(tmp_path):
    def write(text, name="mine.py"):
        (tmp_path / name).write_text(STAND_IN + textwrap.dedent(text))
        return str(tmp_path / name)

    return write


def test_one_turn_is_scored_by_the_rubric(file):
    task: Task = verifiers_task(file(SINGLE), '{"system": "Add."}')
    row = task.row("eval", 0)
    assert (row["id"], row["question"], row["answers"]) == ("mine/train/7", "What is 7+1?", ["8"])
    assert (task.size("train"), task.size("eval"), list(task.reward_parts)) == (14, 2, ["correct", "short"])
    assert json.loads(json.dumps(row)) == row
    opening, done = play(task, row, ["8 "])
    said = [{"role": "system", "content": "Add."}, {"role": "user", "content": "What is 7+1?"}]
    assert opening.messages == said and not opening.tools
    assert done.reward == 1.5 and done.reward_parts == {"correct": 1.0, "short": 0.5}
    assert (done.terminated, done.outcome, done.observation) == (True, Outcome.ENV_DONE, None)
    assert done.metrics == {"correct": 1, "short": 1, "length": 2, "em": 1}
    _, wrong = play(task, row, ["it is nine"])
    assert wrong.reward == pytest.approx(0.05) and wrong.metrics["em"] == 0


def test_two_reward_functions_of_one_name_are_both_paid(file):
    text = change("    rubric = Rubric([correct, short, length]", "    rubric = Rubric([correct, named(2), named(3)]")
    text += """
def named(value):
    def correct(completion):
        return value
    return correct
"""
    task = verifiers_task(file(text))
    assert list(task.reward_parts) == ["correct", "correct_2"]
    *_, done = play(task, task.row("eval", 0), ["8"])
    assert done.reward == 2.0 and done.reward_parts == {"correct": 1.0, "correct_2": 1.0}
    assert done.metrics == {"correct": 1, "correct_2": 2, "correct_3": 3, "em": 1}


def test_what_hooks_write_into_a_row_is_gone_with_its_episode(file):
    text = (
        SINGLE
        + """
class Writes(Env):
    def setup_state(self, state):
        state["info"]["n"] += 100
        state["input"]["info"]["seen"] = True
def load_environment():
    return Writes(dataset=ROWS, rubric=Rubric([correct, number], [1.0, 1.0]), max_turns=1)
def number(info):
    return float(info["n"])
"""
    )
    task = verifiers_task(file(text))
    row = task.row("eval", 0)
    for _ in range(2):
        assert play(task, row, ["8"])[-1].reward_parts == {"correct": 1.0, "number": 107.0}
    assert task.row("eval", 0)["record"]["info"] == {"n": 7}


@pytest.mark.parametrize("form", [NEW, OLD], ids=["new", "old"])
def test_several_turns_by_the_environments_own_hooks(file, form):
    text = GAME
    for old, new in form.items():
        text = text.replace(old, new, 1)
    task = verifiers_task(file(text))
    assert [task.size(split) for split in ("train", "eval")] == [3, 1]
    row = next(task.row("train", i) for i in range(3) if task.row("train", i)["answers"] == ["2"])
    _, low, high, found = play(task, row, ["0", "3", "2"])
    assert [(t.observation.text, t.observation.role, t.reward) for t in (low, high)] == [
        ("higher", "user", 0.0),
        ("lower", "user", 0.0),
    ]
    assert found.terminated and found.reward == 2 and found.metrics == {"won": 1, "em": 1}
    *_, stopped = play(task, row, ["0", "stop"])
    assert stopped.terminated and stopped.reward == 2
    *_, fourth = play(task, row, ["0", "1", "0", "1"])  # max_turns.
    assert fourth.terminated and fourth.reward == 0 and fourth.metrics["em"] == 0
    keys = [t.observation.state_key for t in (low, high)]
    assert len({*keys}) == 2 and keys == [t.observation.state_key for t in play(task, row, ["0", "3"])[1:]]


def test_tools_are_told_and_called_by_the_environment(file):
    task = verifiers_task(file(TOOLS))
    row = task.row("train", 0)
    call = render_call("add", {"a": 1, "b": 2})
    opening, first, both, broken, last = play(
        task, row, [call, call + render_call("add", {"a": 3, "b": 3}), "<tool_call>{</tool_call>", "6"]
    )
    (tool,) = opening.tools
    kinds = {"a": {"type": "integer"}, "b": {"type": "integer"}, "loud": {"type": "boolean"}}
    assert tool["function"] == {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": kinds, "required": ["a", "b"]},
    }
    assert (first.observation.text, first.observation.role) == ("3", "tool")
    assert both.observation.texts == ["3", "6"]
    assert sum(broken.info["errors"].values()) == 1 and broken.reward == 0 and not broken.terminated
    assert last.reward == 1 and last.metrics == {"right": 1, "calls": 3, "em": 1}


def test_schemas_that_an_environment_made_are_taken(file):
    made = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    wrapped = {"type": "function", "function": made}
    for given in (made, wrapped, type("Tool", (), {})()):
        if not isinstance(given, dict):
            given.__dict__.update(made)
        assert tool_schemas(type("E", (), {"tool_defs": [given]})()) == [wrapped]


def test_messages_are_read_as_dicts_and_by_attributes():
    message = Message(role="assistant", content="a")
    assert message.role == message["role"] == "assistant" and not hasattr(message, "tool_calls")


def test_an_episode_of_the_agent_is_recorded(file):
    task = verifiers_task(file(SINGLE))
    row = task.row("train", 0)
    trajectory = letters.play([row["answers"][0]], task.env(), row=row)
    assert trajectory.outcome is Outcome.ENV_DONE and trajectory.metrics["correct"] == 1
    assert trajectory.row["answers"] == row["answers"] and len(trajectory.steps) == 1
    assert {"What is 0+1?", "7"} <= set(task.texts(99))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SINGLE.replace("1.0 if answer", "1 / 0 if answer"), "ZeroDivisionError"),
        (SINGLE.replace("1.0 if answer", "float('nan') if answer"), "reward function correct returned nan"),
    ],
)
def test_what_a_reward_function_raises_is_its_episodes_failure(file, text, told):
    task = verifiers_task(file(text))
    row = task.row("train", 0)
    ended = letters.attempt(task, row, row["answers"][0])
    assert ended.outcome is Outcome.ENV_FAILURE and told in ended.info["error"]


def change(old, new):
    assert old in SINGLE
    return SINGLE.replace(old, new)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = (", "cannot be imported .SyntaxError"),
        ("x = 1", "has no load_environment; tasksets of verifiers' v1 are not supported"),
        ("def load_environment(): raise KeyError('no key')", "load_environment raised KeyError: 'no key'"),
        (change('{"question": f', '{"query": f'), "row mine/train/0 has neither prompt nor question"),
        (change('{"question": f"What is {i}+1?"', '{"prompt": [{"role": "user"}, 3]'), "no list of text messages"),
        (
            change('f"What is {i}+1?"', '[{"role": "user", "content": [{"type": "image_url"}]}]'),
            "content of type 'image_url' is not supported, only text",
        ),
        (change('{"question": f"What is {i}+1?"', '{"prompt": []'), "the prompt of row mine/train/0 is empty"),
        (change("range(16)", "range(7)"), "no eval_dataset, and 7 rows are too few to hold one in 8 out"),
        (change('"dataset": ROWS', '"dataset": None'), "Env has no dataset"),
        (change('"rubric": rubric', '"rubric": None'), "Env has no rubric"),
        (change('"max_turns": 1', '"max_turns": 3'), "Env has no env_response, which more than one turn needs"),
        (change("def length(completion)", "def length(completions)"), "length scores all rollouts of a row together"),
        (change('"max_turns": 1', '"max_turns": 1, "envs": []'), "Env needs a group of environments"),
        (change("    return Env", "    rubric.judge_client = 1\n    return Env"), "Rubric asks a judge model"),
    ],
)
def test_what_cannot_be_used_is_refused_at_start(file, text, told):
    with pytest.raises(ValueError, match=rf"task\.verifiers\.source .*mine\.py.*{told}"):
        verifiers_task(file(text))


def test_a_module_that_is_not_there_and_wrong_args_are_told(file):
    with pytest.raises(ValueError, match="'no_such_module_here' cannot be imported"):
        verifiers_task("no_such_module_here")
    with pytest.raises(ValueError, match=r"task\.verifiers\.args: '\[1\]' is not the text of a JSON object"):
        verifiers_task(file(SINGLE), "[1]")


def test_a_config_makes_it(file):
    config = frozenlake.get_config()
    base.set_task(config, "verifiers")
    config.task.verifiers.source = file(SINGLE)
    with pytest.raises(UserError, match="task 'mine' has no expert to imitate, and warm_start.updates is 200"):
        configured_task(config)
    config.warm_start.updates = 0
    assert configured_task(config).name == "mine"
    config.task.verifiers.source = ""
    with pytest.raises(UserError, match=r"task\.verifiers\.source is ''; it must have"):
        configured_task(config)


REAL = '''
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one
        b: other
    """
    return a + b

async def right(completion, answer) -> float:
    return 1.0 if answer == completion[-1].content else 0.0

def load_environment(tools: bool = False):
    rows = [{"question": "1+2?", "answer": "3"}] * 8
    rubric = vf.Rubric(funcs=[right])
    if tools:
        return vf.ToolEnv(dataset=Dataset.from_list(rows), rubric=rubric, tools=[add], system_prompt="Add.")
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric, system_prompt="Add.")
'''


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tools", [False, True])
def test_environments_of_the_library_itself(file, tools):
    library = pytest.importorskip("verifiers")
    if not hasattr(library, "SingleTurnEnv"):
        pytest.skip("this release has no v0 environments")
    task = verifiers_task(file(REAL), json.dumps({"tools": tools}))
    call = [render_call("add", {"a": 1, "b": 2})] if tools else []
    opening, *middle, done = play(task, task.row("train", 0), [*call, "3"])
    assert [message["role"] for message in opening.messages] == ["system", "user"]
    assert [t.observation.text for t in middle] == ["3"] * tools
    assert [tool["function"]["name"] for tool in opening.tools] == ["add"] * tools
    assert done.terminated and done.reward == 1 and done.metrics["em"] == 1 and done.metrics["num_turns"] == 1 + tools
