"""Conversion and checks of everything that environments, tools and agents return.

Each function returns the value with numpy scalars as Python numbers. A value that training could not compute with, or
that JSON could not store, raises `BoundaryError`, which ends its trajectory as `env_failure`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentr1_jax.envs.base import Observation, Transition
from agentr1_jax.trajectory import POLICIES, ROW_FACTS, Outcome

LARGEST_REWARD = 1e15
"""Largest magnitude of a reward or potential: squares, summed over a batch, stay within float32."""
MOST_NESTED = 100
"""Deepest nesting of JSON: reading, writing and showing JSON recurses."""
MOST_DIGITS = 4300
"""Decimal digits of an integer that Python reads from text and converts to text."""
ERROR_CHARACTERS = 2000


class BoundaryError(ValueError):
    """An environment, tool or agent returned a value of the wrong type or range."""


def check_number(value: Any, name: str, largest: float = math.inf) -> float:
    """Return a finite number of magnitude <= `largest` as a float."""
    plain = _from_numpy(value)
    if not isinstance(plain, int | float):
        raise BoundaryError(f"{name} is {_show(value)}; it must be a number")
    try:
        found = float(plain)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found) or abs(found) > largest:
        limit = "" if largest == math.inf else f" between -{largest:g} and {largest:g}"
        raise BoundaryError(f"{name} is {_show(value)}; it must be a finite number{limit}")
    return found


def check_numbers(values: Any, name: str, largest: float = math.inf) -> dict[str, float]:
    """Return a mapping from names to numbers; None is an empty one."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise BoundaryError(f"{name} is {_show(values)}; it must map names to numbers")
    return {
        check_text(key, f"a key of {name}"): check_number(x, f"{name}[{key!r}]", largest) for key, x in values.items()
    }


def check_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BoundaryError(f"{name} is {_show(value)}; it must be a text")
    return str(value)


def check_flag(value: Any, name: str) -> bool:
    plain = _from_numpy(value)
    if not isinstance(plain, bool):
        raise BoundaryError(f"{name} is {_show(value)}; it must be True or False")
    return plain


def check_outcome(value: Any) -> Outcome:
    try:
        return Outcome(value)
    except ValueError:
        raise BoundaryError(f"outcome is {_show(value)}; it must be one of {', '.join(Outcome)}") from None


def check_json(value: Any, name: str, levels: int = MOST_NESTED) -> Any:
    """Return JSON of plain values."""
    plain = _from_numpy(value)
    if plain is None or isinstance(plain, bool | float):
        return plain
    if isinstance(plain, str):
        return str(plain)
    if isinstance(plain, int):
        if abs(plain) >= 10**MOST_DIGITS:
            raise BoundaryError(f"{name} holds an integer of more than {MOST_DIGITS} digits")
        return int(plain)
    if levels == 0:
        raise BoundaryError(f"{name} is nested more than {MOST_NESTED} levels deep")
    if isinstance(plain, Mapping):
        return {_json_key(key, name): check_json(item, name, levels - 1) for key, item in plain.items()}
    if isinstance(plain, list | tuple):
        return [check_json(item, name, levels - 1) for item in plain]
    raise BoundaryError(f"{name} holds {_show(value)}, which JSON cannot store")


def check_records(values: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Return JSON objects, such as the records of tool calls."""
    if not isinstance(values, Sequence) or not all(isinstance(record, Mapping) for record in values):
        raise BoundaryError(f"{name} is {_show(values)}; it must be a list of mappings")
    return tuple(check_json(record, name) for record in values)


def check_optional_count(value: Any, name: str) -> int | None:
    plain = _from_numpy(value)
    if plain is not None and (type(plain) is not int or plain < 0):
        raise BoundaryError(f"{name} is {_show(value)}; it must be a whole number, 0 or more")
    return plain


def check_ids(value: Any, name: str) -> np.ndarray:
    """Return token ids, int32 [N]; that the vocabulary has them, the engine checks."""
    ids = np.asarray(value)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise BoundaryError(f"{name} are {_show(value)}; they must be integers [N]")
    if ids.size and ids.dtype != np.int32 and not (0 <= ids.min() and ids.max() < 2**31):
        raise BoundaryError(f"{name} are {_show(value)}; ids are from 0 to 2**31 - 1")
    return ids.astype(np.int32, copy=False)


def check_messages(values: Any) -> tuple[dict[str, Any], ...]:
    """Return chat messages, whose tool calls templates take for mappings."""
    messages = check_records(values, "messages of an observation")
    for message in messages:
        for key in ("role", "content"):
            check_text(message.get(key), f"{key!r} of a message")
        check_records(message.get("tool_calls") or (), "'tool_calls' of a message")
    return messages


def check_observation(observation: Any) -> Observation:
    if not isinstance(observation, Observation):
        raise BoundaryError(f"an observation is {_show(observation)}; it must be an Observation")
    o = observation
    if o.texts is not None and not isinstance(o.texts, Sequence):
        raise BoundaryError(f"texts of an observation are {_show(o.texts)}; they must be a list of texts")
    return dataclasses.replace(
        o,
        messages=None if o.messages is None else check_messages(o.messages),
        text=check_optional_text(o.text, "text of an observation"),
        texts=None if o.texts is None else [check_text(text, "one of the texts of an observation") for text in o.texts],
        token_ids=None if o.token_ids is None else check_ids(o.token_ids, "token_ids of an observation"),
        role=check_text(o.role, "role of an observation"),
        tools=check_records(o.tools, "tools of an observation"),
        state_key=check_optional_text(o.state_key, "state_key"),
        evidence=check_optional_text(o.evidence, "evidence of an observation"),
        potential=check_reward(o.potential, "potential"),
    )


def check_transition(transition: Any) -> Transition:
    """Return a transition whose outcome agrees with its flags; an end without one has that of its flags."""
    if not isinstance(transition, Transition):
        raise BoundaryError(f"the result of step() is {_show(transition)}; it must be a Transition")
    t = transition
    terminated, truncated = check_flag(t.terminated, "terminated"), check_flag(t.truncated, "truncated")
    if t.observation is None and not terminated and not truncated:
        raise BoundaryError("the episode goes on without an observation")
    ended = Outcome.ENV_DONE if terminated else Outcome.MAX_STEPS if truncated else None
    outcome = ended if t.outcome is None else check_outcome(t.outcome)
    if outcome and not terminated and not truncated:
        raise BoundaryError(f"outcome is {outcome} though the episode goes on")
    if outcome and POLICIES[outcome].bootstrap and not truncated:
        raise BoundaryError(f"outcome is {outcome}, whose future has a value; the episode must be truncated")
    facts = ("reward_parts", "raw_reward_parts", "tool_calls", "action_key", "info")
    return dataclasses.replace(
        t,
        **check_step(t.reward, {name: getattr(t, name) for name in facts}),
        observation=None if t.observation is None else check_observation(t.observation),
        terminated=terminated,
        truncated=truncated,
        outcome=outcome,
        metrics=check_numbers(t.metrics, "metrics"),
    )


def check_step(reward: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a step; `facts` are some of `STEP_CHECKS`. Raises TypeError for any other name."""
    unknown = facts.keys() - STEP_CHECKS.keys()
    if unknown:
        raise TypeError(f"a step has no {min(unknown)!r}; it has reward, {', '.join(STEP_CHECKS)}")
    checked = {name: STEP_CHECKS[name](value, name) for name, value in facts.items()}
    return {"reward": check_reward(reward, "reward"), **checked}


def check_reward(value: Any, name: str) -> float | None:
    """Return a reward or a potential; None where it is unknown."""
    return None if value is None else check_number(value, name, LARGEST_REWARD)


def check_rewards(value: Any, name: str) -> dict[str, float]:
    return check_numbers(value, name, LARGEST_REWARD)


def check_optional_text(value: Any, name: str) -> str | None:
    return None if value is None else check_text(value, name)


def check_object(value: Any, name: str) -> dict[str, Any]:
    """Return a JSON object; None is an empty one."""
    if value is not None and not isinstance(value, Mapping):
        raise BoundaryError(f"{name} is {_show(value)}; it must be a mapping")
    return dict(check_json(value or {}, name))


STEP_CHECKS = {
    "reward_parts": check_rewards,
    "raw_reward_parts": check_rewards,
    "observation": check_text,
    "tool_calls": check_records,
    "state_key": check_optional_text,
    "action_key": check_optional_text,
    "potential": check_reward,
    "next_potential": check_reward,
    "trainable": check_flag,
    "context_rule": check_text,
    "observation_tokens": check_optional_count,
    "info": check_object,
}


def check_ending(outcome: Any, metrics: Any, info: Any) -> dict[str, Any]:
    """Return the fields of a trajectory that its agent determines at the end."""
    return {
        "outcome": check_outcome(outcome),
        "metrics": check_numbers(metrics, "metrics"),
        "info": check_object(info, "info"),
    }


def check_row(row: Any) -> dict[str, Any]:
    """Return the facts of a task row that its trajectories keep."""
    if not isinstance(row, Mapping):
        raise BoundaryError(f"a task row is {_show(row)}; it must be a mapping")
    if "max_steps" in row and not check_optional_count(row["max_steps"], "row['max_steps']"):
        raise BoundaryError(f"row['max_steps'] is {_show(row['max_steps'])}; a row allows at least 1 step")
    facts = {key: check_json(row[key], f"row[{key!r}]") for key in ROW_FACTS if key in row}
    if not isinstance(facts.get("answers", []), list):  # Of a text, each character would be an answer.
        raise BoundaryError(f"row['answers'] is {_show(row['answers'])}; it must be a list")
    return facts


def describe_error(error: BaseException) -> str:
    """Return type and message of an exception, also where the message cannot be made."""
    try:
        message = str(error)[:ERROR_CHARACTERS]
    except BaseException as failure:
        message = f"(its message raises {type(failure).__name__})"
    return f"{type(error).__name__}: {message}"


def _from_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _json_key(key: Any, name: str) -> str:
    plain = _from_numpy(key)
    if not isinstance(plain, str | int):
        raise BoundaryError(f"{name} has the key {_show(key)}; keys of JSON are texts")
    return str(plain)


def _show(value: Any) -> str:
    """Return a short description of a value, also where its `repr` raises."""
    try:
        text = repr(value)
    except BaseException:
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
