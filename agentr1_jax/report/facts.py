"""Facts of a trajectory beside its tokens: what lists, groups and accounts are made of."""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from agentr1_jax.report.selection import group_name
from agentr1_jax.text.tool_calls import extract_answer
from agentr1_jax.trajectory import POLICIES, Step, Trajectory

Decode = Callable[[Sequence[int]], str]
Facts = dict[str, Any]
MOST_NESTED = 200
"""Deepest nesting of JSON that is shown: writing and showing it recurses."""
MOST_CHARACTERS = 120
"""Of an action or answer in a list."""
_STOP = re.compile(r"(<\|\w+\|>)+$")


def plain(value: Any, levels: int = MOST_NESTED) -> Any:
    """Return any value as strict JSON: numpy as Python, non-finite floats as strings, anything else as its `str`.

    What is nested deeper than `levels` is a mark: runs of earlier versions hold such JSON.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist(), levels)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping | Collection) and not levels:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): plain(item, levels - 1) for key, item in value.items()}
    if isinstance(value, Collection):
        return [plain(item, levels - 1) for item in value]
    return str(value)


def total_reward(trajectory: Trajectory) -> float | str | None:
    """Return the reward that counts; None where the outcome has none or a part of it is missing."""
    if POLICIES[trajectory.outcome].reward == "none":
        return None
    try:
        return plain(trajectory.total_reward)
    except ValueError:
        return None


def mean_advantage(step: Step) -> float | None:
    """Return the mean advantage of a step's tokens; None where training has assigned none."""
    if step.advantages is None or not len(step.advantages):
        return None
    return float(np.mean(step.advantages, dtype=np.float64))


def is_trained(trajectory: Trajectory) -> bool:
    """Return True if training is on the trajectory's tokens; evaluations are only looked at."""
    return POLICIES[trajectory.outcome].training == "train" and not trajectory.uid.startswith("eval")


def trajectory_facts(trajectory: Trajectory, decode: Decode) -> Facts:
    """Return the facts of a trajectory as plain JSON; texts of any length are shortened.

    `path` has a pair of short hashes for each step, of its state and of its action: equal ones are equal.
    """
    row, metrics = trajectory.row, plain(trajectory.metrics)
    gold = row.get("answers", row.get("answer", ()))
    return {
        "uid": trajectory.uid,
        "group": group_name(trajectory.uid),
        "sample": trajectory.sample,
        "phase": trajectory.uid.split("/", 1)[0],
        "task": trajectory.task,
        "outcome": str(trajectory.outcome),
        "trained": is_trained(trajectory),
        "reward": total_reward(trajectory),
        "metrics": metrics,
        "question": None if row.get("question") is None else _text(row["question"]),
        "gold": [_text(x) for x in gold] if isinstance(gold, Sequence) and not isinstance(gold, str) else [_text(gold)],
        "answer": _answer(trajectory, decode),
        "steps": [
            {
                "reward": plain(step.reward),
                "advantage": plain(mean_advantage(step)),
                "tools": [str(call.get("name") or "ill-formed call") for call in step.tool_calls],
                "action": action_text(step, decode),
            }
            for step in trajectory.steps
        ],
        "path": [[_state(step), _action(step, decode)] for step in trajectory.steps],
    }


def parting(one: Facts, other: Facts) -> tuple[int, str] | None:
    """Return the first step, from 0, at which two members of a group differ, and in what: state, action or the end."""
    for number, (mine, theirs) in enumerate(zip(one["path"], other["path"], strict=False)):
        if mine != theirs:
            return number, "state" if mine[0] != theirs[0] else "action"
    shorter = min(len(one["path"]), len(other["path"]))
    return None if len(one["path"]) == len(other["path"]) else (shorter, "end")


def action_text(step: Step, decode: Decode) -> str:
    """Return what a step did, in one short line: its calls, its answer, or its text."""
    if step.tool_calls and all(call.get("name") for call in step.tool_calls):
        return shorten("; ".join(f"{call['name']}({_arguments(call)})" for call in step.tool_calls))
    text = _STOP.sub("", decode(step.response_ids.tolist()))
    answer = extract_answer(text)
    return shorten(text if answer is None else f"answer: {answer}")


def shorten(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text in one line of at most so many characters."""
    line = " ".join(text[: 8 * most].split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _arguments(call: Mapping[str, Any]) -> str:
    given = call.get("arguments")
    if isinstance(given, Mapping):
        return ", ".join(json.dumps(plain(value), ensure_ascii=False) for value in given.values())
    return "" if given is None else str(plain(given))


def _answer(trajectory: Trajectory, decode: Decode) -> str:
    """Return the answer that a trajectory ends with, else its last action; empty without steps."""
    if not trajectory.steps:
        return ""
    return action_text(trajectory.steps[-1], decode).removeprefix("answer: ")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)


def _state(step: Step) -> str:
    return _hash(step.prompt_ids.tobytes() if step.state_key is None else step.state_key)


def _action(step: Step, decode: Decode) -> str:
    """Hash the action's key, else its calls, its answer, or its tokens."""
    if step.action_key is not None:
        return _hash(step.action_key)
    if step.tool_calls:
        return _hash(json.dumps([[call.get("name"), plain(call.get("arguments"))] for call in step.tool_calls]))
    answer = extract_answer(decode(step.response_ids.tolist()))
    return _hash(step.response_ids.tobytes() if answer is None else f"answer {answer}")


def _hash(data: bytes | str) -> str:
    raw = data if isinstance(data, bytes) else data.encode("utf-8", "replace")
    return hashlib.blake2b(raw, digest_size=6).hexdigest()
