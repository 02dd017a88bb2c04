"""One episode in a terminal: which row, who plays it, and its steps as they happen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.agents.session import Completion, Session
from agentr1_jax.envs.base import Row, Task
from agentr1_jax.errors import UserError, inert
from agentr1_jax.policy.config import LoraConfig
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.runner import TaskGroup, run_groups
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.processes import Dispatcher
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.text.tool_calls import extract_answer
from agentr1_jax.train import build
from agentr1_jax.train.restore import load_run_decoder
from agentr1_jax.train.settings import Settings
from agentr1_jax.trajectory import Outcome, Trajectory


def reduce_to_one_slot(settings: Settings) -> Settings:
    """Return settings with one decode slot and the smallest prefill."""
    engine = settings.engine
    return dataclasses.replace(
        settings,
        engine=dataclasses.replace(engine, slots=1, swap_slots=0, pages=None, prefill_rows=engine.prefill_rows[:1]),
    )


def play_by_model(
    settings: Settings, run: str, agent: AgentDisplay, task: TaskGroup, sampling: SamplingConfig, dispatcher: Dispatcher
) -> Trajectory:
    """Sample one episode.

    Args:
      settings: of the run, or with published weights; with one slot, see `reduce_to_one_slot`.
      run: folder of the run whose newest checkpoint samples; "" for the weights of the settings.
      agent: agent of the task.
      task: task row, and the identity of the trajectory.
      sampling: distribution of the responses.
      dispatcher: that of the task's retriever.
    """
    policy = build.make_policy(settings, agent.tokenizer)
    mesh = meshes.learner_mesh(1, jax.device_count(), 1)
    rollout_mesh = meshes.rollout_mesh(mesh, settings.rollout.tensor)
    if run:
        decoder = load_run_decoder(run, policy, mesh, build.make_frozen(settings, policy, mesh))
    else:
        decoder = build.make_decoder(settings, policy, mesh)
    policy = dataclasses.replace(policy, lora=LoraConfig())
    params = build.make_rollout_params(policy, mesh, rollout_mesh)({"decoder": decoder}, {})
    engine = build.make_engine(settings, policy, rollout_mesh, dispatcher)
    ((trajectory,),) = run_groups(engine, params, agent, [task], sampling=sampling, policy_version=0)
    return trajectory


def task_row(task: Task, place: str, flag: str) -> Row:
    """Return the row at `split/index`, the value of a flag. Raises UserError if there is none."""
    split, index = split_and_number(place, flag)
    try:
        return task.row(split, index)
    except ValueError as error:
        raise UserError(f"--{flag}={place}: {error}") from error


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

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the agent."""
        return self.agent.tokenizer

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
    if not steps:
        raise UserError(f"the episode ended without a step ({outcome})")
    answer = extract_answer(decode_response(steps[-1].response_ids, tokenizer)) if outcome is Outcome.ANSWERED else None
    yield "Answer", f"none ({outcome})" if answer is None else answer
    if row.get("answers"):
        verdict = "right" if trajectory.metrics.get("em") == 1 else "wrong"
        yield "Gold answer", f"{' | '.join(row['answers'])} ({verdict})"


def show(console: Console, label: str, text: str) -> None:
    """Print one paragraph behind its label; text of agents and tools is neither markup nor obeyed by the terminal."""
    console.print(Text.assemble((f"{inert(label)}: ", "bold"), inert(text.strip())))
