"""GSM8K's word problems with a calculator or Python, as a Task."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.envs.datasets import RowsTask, data_folder
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.rewards import Part, Reward, Turn
from agentr1_jax.envs.tool_env import ToolEnv
from agentr1_jax.errors import GET_DATA
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
def make_gsm8k(config: Gsm8kConfig, run: TaskContext) -> RowsTask:
    """Make GSM8K. Its splits are `train`, and `eval`, which is GSM8K's test.

    The expert makes the calculations that the solution is annotated with, then answers.

    Raises:
      FileNotFoundError: the data are not there.
      ValueError: a line that is no problem with a result (the message names it).
    """
    folder = data_folder(run.data_dir) / "gsm8k"
    splits = {split: read_problems(folder / file, split) for split, file in FILES.items()}
    tool = run.wrap(CalculatorTool() if config.tool == "calculator" else run.make_tool(config.tool))
    reward = Reward(PARTS, dataclasses.asdict(config.rewards))
    return RowsTask(
        "gsm8k",
        splits,
        make_env=lambda: ToolEnv([tool], _opening, reward, metrics, state_key),
        reward_parts=list(reward.weights),
        expert=lambda row, seed: _make_expert(row, tool.name),
        texts=[text for row in splits["train"] for text in (row["question"], row["solution"])],
        seed=run.seed,
    )


def read_problems(path: Path, split: str) -> list[dict[str, Any]]:
    """Read the problems of a file, as rows.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is no problem, or the file is damaged; the message names it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; {GET_DATA}")
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
    return {
        "id": f"gsm8k/{place}",
        "question": question.strip(),
        "answers": [str(result.numerator if result.denominator == 1 else float(result))],
        "solution": CALCULATION.sub("", solution).rpartition("####")[0].strip(),
        "calculations": [found.strip() for found in CALCULATION.findall(solution)],
    }


def number(text: str | None) -> Fraction | None:
    """Return the number that a text is; None if it is none.

    It may have a currency sign, thousands separators, a unit of per cent, and a stop behind it.
    """
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", (text or "").strip().removesuffix(".").strip())
    plain = re.sub(r"^([+-]?)\s*[$€£]\s*", r"\1", plain).removesuffix("%").strip()
    return Fraction(plain) if NUMBER.fullmatch(plain) else None


def answer_part(row: Row, turns: Sequence[Turn]) -> float:
    """1 where the last turn ends the episode with an answer that is the right number."""
    given = number(turns[-1].answer) if turns and turns[-1].answers else None
    return float(given is not None and given == number(row["answers"][0]))


PARTS: Mapping[str, Part] = {
    "answer": answer_part,
    "format": qa.format_part,
    "repeated_query": qa.repeated_query_part,
}


def metrics(row: Row, turns: Sequence[Turn]) -> dict[str, float]:
    """`em`: whether the answer is the right number; `tool_calls`."""
    return {"em": answer_part(row, turns), "tool_calls": float(sum(len(turn.calls) for turn in turns))}


def state_key(row: Row, turns: Sequence[Turn]) -> str:
    """Row, and all that the tool has said: equal states of a group have equal keys."""
    said = [result.content for turn in turns for result in turn.results]
    return "|".join([row["id"], str(len(turns)), json.dumps(sorted(said))])


def _opening(row: Row) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{row['question']}\n\n{INSTRUCTION}"}]


def _make_expert(row: Row, tool: str) -> Expert:
    responses = _play(row, tool)
    return lambda observation: next(responses)


def _play(row: Row, tool: str) -> Iterator[str]:
    for calculation in row["calculations"]:
        yield render_call(tool, {"expression": calculation} if tool == "calculator" else {"code": calculation})
    while True:
        yield render_answer(row["answers"][0])
