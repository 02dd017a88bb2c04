"""Ask an agent one question and show its steps as they happen.

    python -m experiments.ask RUN "Who directed Pale River?" [--world=eval/3] [--temperature=0.7]
    python -m experiments.ask RUN --question_row=eval/5
    python -m experiments.ask WEIGHTS "Who directed Jaws?" --config=configs/multihop_tiny.py

RUN is the folder of a run: its task, tools, tokenizer and newest checkpoint answer. WEIGHTS is a Hugging Face folder or
hub id: the config names task, tools and budget; the tokenizer is that of the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console
from rich.text import Text

from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.agents.session import Completion, Identity, Session
from agentr1_jax.envs.base import Row, Task
from agentr1_jax.errors import UserError
from agentr1_jax.policy.config import LoraConfig
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.runner import TaskGroup, run_groups
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.processes import Dispatcher
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.text.tool_calls import extract_answer
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build
from agentr1_jax.train.restore import load_run_decoder
from agentr1_jax.train.settings import Settings
from agentr1_jax.trajectory import Outcome, Trajectory
from experiments.setup import complete, make_task, read_run, read_settings, run_main, use_compile_cache, with_weights

CONFIG = configs.define_config_flag()
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "of sampling; 0 is greedy", lower_bound=0.0)
SEED = flags.DEFINE_integer("seed", 0, "of sampling")
WORLD = flags.DEFINE_string("world", None, "hopworld: the world that the question is about, eval/0 unless given")
QUESTION_ROW = flags.DEFINE_string("question_row", None, "a row of the task to ask instead of a question, e.g. eval/5")


def main(argv: Sequence[str]) -> None:
    """Ask one question, show the episode step by step and its result."""
    source, question = argv[1], " ".join(argv[2:]).strip()
    if bool(question) == bool(QUESTION_ROW.value):
        raise UserError("give either a question that is not empty or --question_row=SPLIT/INDEX, e.g. eval/5")
    is_run = CONFIG.value is None
    if is_run:
        settings = read_run_settings(source)
    else:
        settings = read_settings(complete(with_weights(CONFIG.value, source), jax.devices()))
    settings = build.fit_devices(reduce_to_one_slot(settings))
    use_compile_cache(settings)
    dispatcher = Dispatcher()
    task = make_task(settings, ToolMetrics(), dispatcher)
    row = task_row(task, QUESTION_ROW.value) if QUESTION_ROW.value else free_row(task, question, WORLD.value)
    task.env()  # Builds what the tools need: a wrong index is reported here, not as a failure of the episode.
    tokenizer = build.make_tokenizer(settings, task, resumes=True)
    agent = build.make_agent(settings, task, tokenizer)
    policy = build.make_policy(settings, tokenizer)

    mesh = meshes.learner_mesh(1, jax.device_count(), 1)
    rollout_mesh = meshes.rollout_mesh(mesh, settings.rollout.tensor)
    if is_run:
        decoder = load_run_decoder(source, policy, mesh, build.make_frozen(settings, policy, mesh))
    else:
        decoder = build.make_decoder(settings, policy, mesh)
    policy = dataclasses.replace(policy, lora=LoraConfig())
    params = build.make_rollout_params(policy, mesh, rollout_mesh)({"decoder": decoder}, {})
    engine = build.make_engine(settings, policy, rollout_mesh, dispatcher)

    console = Console(soft_wrap=True)
    show(console, "Question", row["question"])
    ((trajectory,),) = run_groups(
        engine,
        params,
        AgentDisplay(agent, console),
        [TaskGroup(row, [Identity("ask", 0, 0, task.name, SEED.value)])],
        sampling=SamplingConfig(TEMPERATURE.value),
        policy_version=0,
    )
    for label, text in conclusion(trajectory, row, tokenizer):
        show(console, label, text)


def read_run_settings(source: str) -> Settings:
    """Return the settings of a run. Raises UserError if `source` is no run."""
    try:
        return read_settings(read_run(source))
    except UserError as error:
        raise UserError(f"{error}; to ask published weights, name their task with --config=FILE") from error


def reduce_to_one_slot(settings: Settings) -> Settings:
    """Return settings with one decode slot and the smallest prefill."""
    engine = settings.engine
    return dataclasses.replace(
        settings,
        engine=dataclasses.replace(engine, slots=1, swap_slots=0, prefill_rows=engine.prefill_rows[:1]),
    )


def task_row(task: Task, place: str) -> Row:
    """Return the row at `split/index`. Raises UserError if there is none."""
    split, index = split_and_number(place, "question_row")
    try:
        return task.row(split, index)
    except ValueError as error:
        raise UserError(f"--question_row={place}: {error}") from error


def free_row(task: Task, question: str, world: str | None) -> Row:
    """Return a row for a free question, without answers; HopWorld's tools need a world to search."""
    row = {"id": "asked", "question": question, "answers": []}
    if task.name != "hopworld":
        if world is not None:
            raise UserError(f"--world={world}: the task is {task.name}, and only hopworld has worlds; leave it out")
        return row
    split, number = split_and_number(world or "eval/0", "world")
    try:
        task.row(split, 0)
    except ValueError as error:
        raise UserError(f"--world={world}: {error}") from error
    return {**row, "world": f"{split}/{number}"}


def split_and_number(place: str, flag: str) -> tuple[str, int]:
    """Return split and number of `eval/5`. Raises UserError for any other form."""
    split, _, number = place.rpartition("/")
    if not split or not number.isdecimal():
        raise UserError(f"--{flag}={place}: write SPLIT/NUMBER, e.g. eval/5")
    return split, int(number)


@dataclasses.dataclass(frozen=True)
class AgentDisplay:
    """An agent that prints its steps."""

    agent: EnvLoop
    console: Console

    async def run(self, session: Session, row: Row) -> None:
        """Run one episode on a task row."""
        display: Any = SessionDisplay(session, self.agent.tokenizer, self.console)
        await self.agent.run(display, row)


class SessionDisplay:
    """A session that prints each response and its results."""

    def __init__(self, session: Session, tokenizer: Tokenizer, console: Console) -> None:
        self._session = session
        self._tokenizer = tokenizer
        self._console = console

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def generate(self, prompt_ids: np.ndarray, max_tokens: int, stop: Sequence[Sequence[int]] = ()) -> Completion:
        """See `Session.generate`."""
        completion = await self._session.generate(prompt_ids, max_tokens, stop)
        self._console.rule(style="dim")
        truncated = "" if completion.finish_reason == "stop" else " (truncated)"
        show(self._console, f"Agent{truncated}", decode_response(completion.ids, self._tokenizer))
        return completion

    def record(self, reward: float | None, **facts: Any) -> None:
        """See `Session.record`."""
        self._session.record(reward, **facts)
        for label, text in describe_results(facts.get("observation", ""), facts.get("tool_calls", ())):
            show(self._console, label, text)


def decode_response(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return the text of a response without its stop token."""
    ended = len(ids) > 0 and int(ids[-1]) in tokenizer.stop_ids
    return tokenizer.decode(ids[: len(ids) - ended])


def describe_results(observation: str, tool_calls: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the results of a step as label and text: each call and its result, else the observation."""
    for call in tool_calls:
        arguments = ", ".join(f"{key}={value!r}" for key, value in (call["arguments"] or {}).items())
        yield "Call", f"{call['name']}({arguments})" if call["name"] else "(not readable)"
        yield "Result", call["result"]
    if observation and not tool_calls:
        yield "Environment", observation


def conclusion(trajectory: Trajectory, row: Row, tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Yield the result of the episode as label and text.

    Raises:
      UserError: something other than the agent ended the episode.
    """
    steps, outcome = trajectory.steps, trajectory.outcome
    if "error" in trajectory.info:
        raise UserError(f"the episode failed ({outcome}): {trajectory.info['error']}")
    if outcome is Outcome.CONTEXT_OVERFLOW and not steps:
        raise UserError("the question leaves no room for a response in budget.context_tokens; ask a shorter one")
    answer = extract_answer(decode_response(steps[-1].response_ids, tokenizer)) if outcome is Outcome.ANSWERED else None
    yield "Answer", f"none ({outcome})" if answer is None else answer
    if row["answers"]:
        verdict = "right" if trajectory.metrics.get("em") == 1 else "wrong"
        yield "Gold answer", f"{' | '.join(row['answers'])} ({verdict})"


def show(console: Console, label: str, text: str) -> None:
    """Print one paragraph behind its label; text of agents and tools is never markup."""
    console.print(Text.assemble((f"{label}: ", "bold"), text.strip()))


if __name__ == "__main__":
    run_main(main, arguments=("RUN_OR_WEIGHTS", "[QUESTION]"))
