"""Reward functions of the user, named in a config as `module:function=weight`."""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
import re
from collections.abc import Collection, Sequence
from typing import Any

from agentr1_jax.envs.base import Row
from agentr1_jax.envs.rewards import Part, Turn

_SPEC = re.compile(r"([\w.]+):(\w+)=(.+)")
EXAMPLE = "e.g. 'my_rewards:brevity=0.2'"


class RewardError(Exception):
    """A reward function of the user failed; the episode ends with `env_failure`."""


def load_functions(specs: Sequence[str], taken: Collection[str] = ()) -> tuple[dict[str, Part], dict[str, float]]:
    """Imports reward functions; each becomes a part of its own name.

    A function has the signature of `rewards.Part`: from the row and the turns so far to a finite number, which the last
    turn earns, or to None where it cannot tell. Anything else that it returns or raises is a `RewardError`.

    Args:
      specs: `module:function=weight`, the module as one would import it.
      taken: names that other parts have.

    Returns:
      the parts and their weights, by name.

    Raises:
      ValueError: a spec cannot be read, its module cannot be imported, or what it names is no such function.
    """
    parts: dict[str, Part] = {}
    weights: dict[str, float] = {}
    for spec in specs:
        found = _SPEC.fullmatch(str(spec))
        weight = _number(found[3]) if found else None
        if not found or weight is None:
            raise ValueError(f"reward_functions: {spec!r} is not 'module:function=weight', {EXAMPLE}")
        module, name = found[1], found[2]
        if name in taken or name in parts:
            raise ValueError(
                f"reward_functions: {spec!r}: there is a reward part {name!r} already; rename the function"
            )
        parts[name] = _check_values(_function(spec, module, name), f"{module}:{name}")
        weights[name] = weight
    return parts, weights


def _function(spec: str, module: str, name: str) -> Any:
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # Whatever the user's module raises when it is imported.
        raise ValueError(
            f"reward_functions: {spec!r}: cannot import {module!r} ({type(error).__name__}: {error}); it must be "
            "importable from the folder that the run is started in, or installed"
        ) from error
    if function is None:
        raise ValueError(f"reward_functions: {spec!r}: module {module!r} has no {name!r}")
    if not callable(function) or inspect.iscoroutinefunction(function):
        what = "an async function" if callable(function) else f"a {type(function).__name__}"
        raise ValueError(f"reward_functions: {spec!r}: {name!r} is {what}; it must be a function (row, turns) -> float")
    try:
        inspect.signature(function).bind({}, [])
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward_functions: {spec!r}: {name!r} cannot be called as {name}(row, turns): {error}"
        ) from error
    return function


def _check_values(function: Any, name: str) -> Part:
    def part(row: Row, turns: Sequence[Turn]) -> float | None:
        try:
            value = function(row, turns)
        except Exception as error:
            raise RewardError(f"reward function {name} raised {type(error).__name__}: {error}") from error
        if value is None:
            return None
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise RewardError(f"reward function {name} returned {value!r:.80}, which is no finite number")
        return float(value)

    return part


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
