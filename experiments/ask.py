"""Ask an agent one question and show its steps as they happen.

    python -m experiments.ask RUN "Who directed Pale River?" [--world=eval/3] [--temperature=0.7]
    python -m experiments.ask RUN --question_row=eval/5
    python -m experiments.ask WEIGHTS "Who directed Jaws?" --config=configs/multihop_tiny.py

RUN is the folder of a run: its task, tools, tokenizer and newest checkpoint answer. WEIGHTS is a Hugging Face folder or
hub id: the config names task, tools and budget; the tokenizer is that of the weights.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

import jax
from absl import flags
from rich.console import Console

from agentr1_jax.agents.session import Identity
from agentr1_jax.envs.base import Row, Task
from agentr1_jax.errors import UserError
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.runner import TaskGroup
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.processes import Dispatcher
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build
from agentr1_jax.train.restore import newest_checkpoint
from agentr1_jax.train.settings import Settings
from experiments.episode import (
    AgentDisplay,
    conclusion,
    play_by_model,
    reduce_to_one_slot,
    show,
    split_and_number,
    task_row,
)
from experiments.setup import complete, make_task, read_run, read_settings, run_main, use_compile_cache, with_weights

CONFIG = configs.define_config_flag()
configs.define_trust_flag()
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "of sampling; 0 is greedy", lower_bound=0.0)
SHOWN_QUESTIONS = 3
"""Questions that are shown of a world where the asked one names what is not in it."""
_QUESTION_WORDS = "Who|Whom|Whose|Which|What|When|Where|Why|How|In|On|Of|Did|Does|Do|Is|Was|Are|Were|Name|The|A|And|For"
_NAME = re.compile(rf"\b(?!(?:{_QUESTION_WORDS})\b)[A-Z][\w'-]*(?: [A-Z][\w'-]*)*")
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
    place = QUESTION_ROW.value
    row = task_row(task, place, "question_row") if place else free_row(task, question, WORLD.value)
    task.env()  # Builds what the tools need: a wrong index is reported here, not as a failure of the episode.
    tokenizer = build.make_tokenizer(settings, task, resumes=True)
    agent = build.make_agent(settings, task, tokenizer)

    if is_run:
        newest_checkpoint(source)  # A run without one is refused before anything is shown.
    console = Console(soft_wrap=True)
    show(console, "Question", row["question"])
    if task.name == "hopworld" and question:
        for label, text in describe_world(task, row):
            show(console, label, text)
    group = TaskGroup(row, [Identity("ask", 0, 0, task.name, SEED.value)])
    run, sampling = source if is_run else "", SamplingConfig(TEMPERATURE.value)
    trajectory = play_by_model(settings, run, AgentDisplay(agent, console), group, sampling, dispatcher)
    for label, text in conclusion(trajectory, row, tokenizer):
        show(console, label, text)


def read_run_settings(source: str) -> Settings:
    """Return the settings of a run. Raises UserError if `source` is no run."""
    try:
        read_run(source, executes=False)
    except UserError as error:
        raise UserError(f"{error}; to ask published weights, name their task with --config=FILE") from error
    return read_settings(read_run(source))


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


def describe_world(task: Task, row: Row) -> Iterator[tuple[str, str]]:
    """Yield, as label and text, the HopWorld world that a free question is about, and what it names that is not there.

    Names are runs of capitalised words. Where one is missing, some questions of the world are shown.
    """
    from agentr1_jax.tasks.hopworld.world import world

    key = row["world"]
    passages = [passage.line.lower() for passage in world(key).passages]
    yield "World", f"{key} of hopworld, {len(passages)} passages; --world=SPLIT/NUMBER asks another one"
    names = dict.fromkeys(_NAME.findall(row["question"]))
    missing = [name for name in names if not any(name.lower() in passage for passage in passages)]
    if missing:
        split, _, number = key.rpartition("/")
        per_world = next(i for i in itertools.count() if task.row(split, i)["world"] != f"{split}/0")
        first = int(number) * per_world
        asked = " ".join(task.row(split, first + i)["question"] for i in range(min(SHOWN_QUESTIONS, per_world)))
        yield "Not in this world", f"{', '.join(missing)}; it can be asked: {asked}"


if __name__ == "__main__":
    run_main(main, arguments=("RUN_OR_WEIGHTS", "[QUESTION]"))
