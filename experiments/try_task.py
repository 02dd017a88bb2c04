"""Play one episode of a task by hand, by its expert or by a model, and check the task.

    python -m experiments.try_task my_tasks.py:guess [--row=eval/3] [--by=expert]
    python -m experiments.try_task hopworld --by=runs/quickstart
    python -m experiments.try_task --config=configs/countdown.py --config.task.countdown.numbers=4

--by names who plays: `keyboard`, the task's `expert`, or a model: a run's folder, weights (a Hugging Face folder or hub
id). Without it the keyboard does in a terminal, the expert elsewhere. The task is `FILE.py:NAME`, a name, or that of
--config; the first two have the budgets of `configs/blank.py`. Then the task is checked: tools, bad calls, time limit,
rewards, state keys, determinism. The exit status is 0 if all checks pass, 1 if one fails, 2 for a mistake.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import flags
from rich.console import Console

from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.agents.session import Identity, ScriptedSession
from agentr1_jax.envs.base import Expert, Row, Task, has_expert, has_texts
from agentr1_jax.errors import UserError, inert, user_error
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.runner import RETRIED, TaskGroup
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.processes import Dispatcher
from agentr1_jax.text.sentencepiece import train_sentencepiece
from agentr1_jax.text.tokenizer import Tokenizer, load_tokenizer
from agentr1_jax.text.tool_calls import render_answer, render_call
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build
from agentr1_jax.train.settings import Settings
from agentr1_jax.trajectory import Outcome, Trajectory
from configs import blank
from experiments.episode import AgentDisplay, play_by_model, reduce_to_one_slot, show, task_row
from experiments.setup import (
    Config,
    change_config,
    complete,
    is_run,
    make_task,
    read_run,
    read_settings,
    run_main,
    use_compile_cache,
    with_policy_of,
    with_weights,
)
from experiments.task_checks import Record, RecordingEnv, Verdict, check_task, describe_error

CONFIG = configs.define_config_flag()
ROW = flags.DEFINE_string("row", None, "row to play, e.g. eval/3; the first one of the evaluation split unless given")
BY = flags.DEFINE_string("by", None, "keyboard, expert, or a model: a run's folder or weights")
TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "of a model's sampling; 0 is greedy", lower_bound=0.0)
SEED = flags.DEFINE_integer("seed", 0, "of the environment, the expert and of sampling")

HELP = "Type a call (TOOL KEY=VALUE ... or JSON), `answer TEXT`, or any text, which is sent as it is. Ctrl-D ends."
TEXTLESS_ROWS = 32
"""Rows whose openings a tokenizer is trained on where the task has no texts."""


def main(argv: Sequence[str]) -> int:
    """Play one episode, print a verdict for each check, and return the exit status."""
    if (CONFIG.value is None) == (len(argv) < 2):
        raise UserError("name a task, FILE.py:NAME or a name such as hopworld; or give --config=FILE in its place")
    config = CONFIG.value if CONFIG.value is not None else blank.get_config(argv[1])
    by = BY.value or ("keyboard" if sys.stdin.isatty() else "expert")
    console = Console(soft_wrap=True)
    settings = read_player(config, by)
    use_compile_cache(settings)
    dispatcher = Dispatcher()
    task = make_task(settings, ToolMetrics(), dispatcher)
    row = task_row(task, ROW.value or f"{settings.eval.split}/0", "row")
    agent = build.make_agent(settings, task, make_tokenizer(settings, task, by))
    played = Record()
    recording = dataclasses.replace(agent, make_env=lambda: RecordingEnv(task.env(), played))
    show_opening(console, agent, task, row)
    verdict = play(recording, task, row, by, settings, dispatcher, console)
    console.rule(style="dim")
    verdicts = [
        verdict,
        *check_task(task, row, SEED.value, played, lambda wrap: make_task(settings, ToolMetrics(), wrap=wrap)),
    ]
    for v in verdicts:
        mark, style = {True: ("ok  ", "green"), False: ("FAIL", "bold red"), None: ("--  ", "dim")}[v.ok]
        console.print(f"[{style}]{mark}[/] {v.name}: ", end="")
        console.print(inert(v.detail), markup=False, highlight=False)
    failed = [v.name for v in verdicts if v.ok is False]
    console.print(
        f"{len(failed)} of {len(verdicts)} checks failed: {', '.join(failed)}" if failed else "all checks passed"
    )
    return 1 if failed else 0


def read_player(config: Config, by: str) -> Settings:
    """Return the settings of an episode: those of the task, with the policy that plays.

    Raises:
      UserError: there is no such run, or the config is wrong.
    """
    config = change_config(config, {"seed": SEED.value})
    if by in ("keyboard", "expert"):
        if not (config.policy.weights or config.policy.preset):
            config = change_config(config, {"policy.preset": "tiny"})
        # Who thinks at a keyboard is not timed.
        config = change_config(config, {"budget.step_seconds": None, "budget.trajectory_seconds": None})
        return read_settings(complete(config, jax.devices()))
    config = with_policy_of(config, read_run(by, executes=False)) if is_run(by) else with_weights(config, by)
    return build.fit_devices(reduce_to_one_slot(read_settings(complete(config, jax.devices()))))


def make_tokenizer(settings: Settings, task: Task, by: str) -> Tokenizer:
    """Return the tokenizer of the policy; one that is still to be trained is trained for this episode alone."""
    if settings.tokenizer.path or is_run(by) or settings.warm_start.init_from:
        return build.make_tokenizer(settings, task, resumes=is_run(by))
    texts = list(task.texts(settings.tokenizer.texts)) if has_texts(task) else list(opening_texts(settings, task))
    with tempfile.TemporaryDirectory() as folder, user_error("a tokenizer cannot be trained: "):
        path = f"{folder}/tokenizer.model"
        train_sentencepiece(texts, path, max(settings.tokenizer.vocab_size, 1024))
        return load_tokenizer(path)


def opening_texts(settings: Settings, task: Task) -> Sequence[str]:
    """Return the messages that some episodes open with."""
    rows = [task.row(settings.eval.split, index) for index in range(TEXTLESS_ROWS)]
    openings = [asyncio.run(task.env().reset(row, 0)) for row in rows]
    return [str(message["content"]) for opening in openings for message in opening.messages or ()]


def show_opening(console: Console, agent: EnvLoop, task: Task, row: Row) -> None:
    """Print the tools with their schemas, and the first prompt as the policy reads it."""
    try:
        start = asyncio.run(task.env().reset(row, SEED.value))
        prompt = agent.render_opening(start)
    except Exception as error:  # The checks tell it, too.
        raise UserError(f"row {row.get('id')}: the episode cannot begin: {describe_error(error)}") from error
    for tool in start.tools:
        function = tool["function"]
        show(console, "Tool", f"{function['name']}: {function['description']} {json.dumps(function['parameters'])}")
    show(console, f"Prompt, {len(prompt)} tokens", f"\n{agent.tokenizer.decode(prompt)}")


def play(
    agent: EnvLoop, task: Task, row: Row, by: str, settings: Settings, dispatcher: Dispatcher, console: Console
) -> Verdict:
    """Play the episode, show it, and return the verdict on how it ended."""
    identity, display = Identity("try", 0, 0, task.name, SEED.value), AgentDisplay(agent, console)
    try:
        if by in ("keyboard", "expert"):
            expert = Keyboard(console, agent, row, task) if by == "keyboard" else make_expert(task, row)
            session = ScriptedSession(identity, expert, agent.tokenizer, agent.call_format)
            session.begin(row)
            asyncio.run(display.run(session, row))
            trajectory = session.trajectory()
        else:
            run, group = by if is_run(by) else "", TaskGroup(row, [identity])
            trajectory = play_by_model(settings, run, display, group, SamplingConfig(TEMPERATURE.value), dispatcher)
    except UserError:
        raise
    except (EOFError, KeyboardInterrupt):
        return Verdict("episode", None, "left by the player")
    except Exception as error:
        return Verdict("episode", False, describe_error(error))
    failed = "error" in trajectory.info or trajectory.outcome in RETRIED
    return Verdict("episode", not failed, describe_end(trajectory))


def describe_end(trajectory: Trajectory) -> str:
    """Return outcome, length, return and metrics of an episode, and what went wrong."""
    faults = [trajectory.info["error"]] if "error" in trajectory.info else []
    if trajectory.outcome is Outcome.TOOL_FAILURE:
        faults += [call["result"] for call in trajectory.steps[-1].tool_calls if not call["ok"]]
    fault = "".join(f"; {text}" for text in faults)
    metrics = "".join(f", {name} {x:.3g}" for name, x in trajectory.metrics.items())
    ended = f"{trajectory.outcome} after {len(trajectory.steps)} steps, return {trajectory.total_reward:.3g}"
    return f"{ended}{metrics}{fault}"


def make_expert(task: Task, row: Row) -> Expert:
    """Return the task's expert. Raises UserError where it has none."""
    if not has_expert(task):
        raise UserError(f"task {task.name!r} has no expert; play by --by=keyboard, or by a model, --by=RUN_OR_WEIGHTS")
    return task.expert(row, SEED.value)


class Keyboard:
    """An expert that types."""

    def __init__(self, console: Console, agent: EnvLoop, row: Row, task: Task) -> None:
        self._console = console
        start = asyncio.run(task.env().reset(row, SEED.value))
        self._tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in start.tools}
        console.print(HELP, markup=False, highlight=False)

    def __call__(self, observation: str | None) -> str:
        """Return the next response; raises EOFError at the end of the input."""
        return read_line(self._console.input("> "), self._tools)


def read_line(line: str, tools: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what was typed as a response in the common format.

    `TOOL KEY=VALUE ...` and a JSON object with `name` and `arguments` are calls; words without `=` belong to the value
    before them, or to the only argument of the tool. `answer TEXT` is an answer where there are tools. All else is sent
    as it is.

    Args:
      line: the line.
      tools: name of each tool -> JSON Schema of its arguments.
    """
    text = line.strip()
    first, _, rest = text.partition(" ")
    if text.startswith("{"):
        try:
            call = json.loads(text)
            return render_call(call["name"], call.get("arguments", {}))
        except (ValueError, KeyError, TypeError):
            return line
    if first in tools:
        return render_call(first, read_arguments(rest, tools[first]))
    return render_answer(rest.strip()) if first == "answer" and tools else line


def read_arguments(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a typed call; values of other types than text are read as JSON."""
    properties = schema.get("properties", {})
    try:
        words = shlex.split(text)
    except ValueError:  # An apostrophe, not a quote.
        words = text.split()
    values: dict[str, str] = {}
    key = next(iter(properties)) if len(properties) == 1 else None
    for word in words:
        name, equals, value = word.partition("=")
        if equals and (name in properties or name.isidentifier()):
            key, values[name] = name, value
        elif key is not None:
            values[key] = f"{values[key]} {word}" if key in values else word
    return {name: _read_value(value, properties.get(name, {})) for name, value in values.items()}


def _read_value(value: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("type", "string") == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


if __name__ == "__main__":
    run_main(main, arguments=("[TASK]",))
