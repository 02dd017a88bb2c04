"""GSM8K's word problems with a calculator or Python, as a Task."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.envs.datasets import FiniteRows, data_folder
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.rewards import Part, Reward, Turn
from agentr1_jax.envs.tool_env import ToolEnv
from agentr1_jax.tasks import qa
from agentr1_jax.text.tool_calls import render_answer, render_call
from agentr1_jax.tools.calculator import CalculatorTool
from agentr1_jax.validation import STRICT

INSTRUCTION = (
    "Solve the problem with the help of the tool. When you know the result, give it as a plain number inside <answer> "
    "and </answer>, for example <answer> 42 </answer>."
)
FILES = {"train": "train.jsonl.gz", "eval": "test.jsonl.gz"}
CALCULATION = re.compile(r"<<([^<>=]+)=[^<>]*>>")
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)")


@dataclass(frozen=True, config=STRICT)
class Gsm8kRewards:
    """Weights of the reward parts of GSM8K."""

    answer: float = 1.0
    """of the right number"""
    format: float = 0.1
    """of the format, whose raw value is -1 for an ill-formed step"""
    repeated_query: float = -0.1
    """of each call made before"""


@dataclass(frozen=True, config=STRICT)
class Gsm8kConfig:
    """Keys of `task.gsm8k`."""

    tool: Literal["calculator", "python"] = "calculator"
    """the tool that helps"""
    rewards: Gsm8kRewards = Gsm8kRewards()
    """weights of the reward parts"""


@register("gsm8k", Gsm8kConfig)
def make_gsm8k(config: Gsm8kConfig, run: TaskContext) -> Gsm8kTask:
    """Make GSM8K. Raises FileNotFoundError or ValueError where its data are missing or damaged."""
    return Gsm8kTask(config, run)


class Gsm8kTask:
    """The Task of solving word problems whose results are numbers.

    Splits: `train`, and `eval`, which is GSM8K's test.

    Args:
      config: its keys.
      run: what the run gives it.

    Raises:
      FileNotFoundError: the data are not there.
      ValueError: a line that is no problem with a result (the message names it).
    """

    name = "gsm8k"

    def __init__(self, config: Gsm8kConfig, run: TaskContext) -> None:
        self._reward = Reward(PARTS, dataclasses.asdict(config.rewards))
        folder = data_folder(run.data_dir) / "gsm8k"
        problems = {split: read_problems(folder / file, split) for split, file in FILES.items()}
        self._rows = FiniteRows(self.name, problems, run.seed)
        self._tool = run.wrap(CalculatorTool() if config.tool == "calculator" else run.make_tool(config.tool))

    @property
    def reward_parts(self) -> Sequence[str]:
        """The parts that have a weight."""
        return list(self._reward.weights)

    def row(self, split: str, index: int) -> Row:
        """Row `index` of a split; see `FiniteRows`."""
        return self._rows.row(split, index)

    def size(self, split: str) -> int:
        """Number of problems of a split."""
        return self._rows.size(split)

    def env(self) -> ToolEnv:
        """A fresh environment; all share the tool."""
        return ToolEnv(tools=[self._tool], opening=_opening, reward=self._reward, metrics=metrics, state_key=state_key)

    def expert(self, row: Row, seed: int) -> Expert:
        """Makes the calculations that the solution is annotated with, then answers; `seed` is not used."""
        return functools.partial(_next, _play(row, self._tool.name))

    def texts(self, count: int) -> list[str]:
        """Training problems and their solutions, at most `count`."""
        both = ((row["question"], row["solution"]) for row in self._rows.splits["train"])
        return list(itertools.islice(itertools.chain.from_iterable(both), count))


def read_problems(path: Path, split: str) -> list[dict[str, Any]]:
    """The problems of a file, as rows.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is no problem, or the file is damaged; the message names it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; task.data_dir must name the folder that holds gsm8k/")
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines = file.readlines()
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); restore it") from error
    return [_row(line, f"{path}, line {number}", f"{split}/{number - 1}") for number, line in enumerate(lines, 1)]


def _row(line: str, where: str, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        question, solution = record["question"], record["answer"]
        result = number(solution.rpartition("####")[2])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{where}: not a problem of GSM8K, which has `question` and `answer` ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(question, str) or "####" not in solution or result is None:
        raise ValueError(f"{where}: its answer must end with #### and a number, and its question must be text")
    calculations = [found.strip() for found in CALCULATION.findall(solution)]
    steps = CALCULATION.sub("", solution).rpartition("####")[0].strip()
    row = {"id": f"gsm8k/{place}", "question": question.strip(), "answers": [_plain(result)]}
    return {**row, "solution": steps, "calculations": calculations}


def number(text: str | None) -> Fraction | None:
    """The number that a text is, with or without a currency sign, thousands separators, a unit of per cent or a stop
    behind it; None if it is none.
    """
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", (text or "").strip().removesuffix(".").strip())
    plain = re.sub(r"^([+-]?)\s*[$€£]\s*", r"\1", plain).removesuffix("%").strip()
    return Fraction(plain) if NUMBER.fullmatch(plain) else None


def _plain(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else str(float(value))


def answer_part(row: Row, turns: Sequence[Turn]) -> float:
    """1 where the turn ends the episode with an answer that is the right number."""
    return float(turns[-1].answers and _right(turns[-1].answer, row))


PARTS: Mapping[str, Part] = {
    "answer": answer_part,
    "format": qa.format_part,
    "repeated_query": qa.repeated_query_part,
}


def metrics(row: Row, turns: Sequence[Turn]) -> dict[str, float]:
    """`em`: whether the answer is the right number; `tool_calls`."""
    solved = bool(turns) and turns[-1].answers and _right(turns[-1].answer, row)
    return {"em": float(solved), "tool_calls": float(sum(len(turn.calls) for turn in turns))}


def state_key(row: Row, turns: Sequence[Turn]) -> str:
    """Row, and all that the tool has said: equal states of a group have equal keys."""
    said = [result.content for turn in turns for result in turn.results]
    return "|".join([row["id"], str(len(turns)), json.dumps(sorted(said))])


def _right(answer: str | None, row: Row) -> bool:
    given = number(answer)
    return given is not None and given == number(row["answers"][0])


def _opening(row: Row) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{row['question']}\n\n{INSTRUCTION}"}]


def _play(row: Row, tool: str) -> Iterator[str]:
    for calculation in row["calculations"]:
        yield render_call(tool, {"expression": calculation} if tool == "calculator" else {"code": calculation})
    while True:
        yield render_answer(row["answers"][0])


def _next(said: Generator[str] | Iterator[str], shown: str | None) -> str:
    return next(said)
