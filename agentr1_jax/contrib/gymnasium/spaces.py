"""Gymnasium's spaces as text: writing observations, reading actions.

Spaces are recognised by class name, so that this module can be imported without Gymnasium.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

OBSERVATION_SPACES = ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text", "Tuple", "Dict")
ACTION_SPACES = ("Discrete", "MultiDiscrete", "Text")


class ActionFormat(NamedTuple):
    """Text form of the actions of a space.

    Attributes:
      instruction: one sentence for the policy.
      read: text of a response -> the action; None where the text is no action.
      sample: returns the text of a random action.
    """

    instruction: str
    read: Callable[[str], Any]
    sample: Callable[[random.Random], str]


def observation_text(space: Any, value: Any, digits: int) -> str:
    """Return an observation of a space as text; `digits` is the number of significant digits of floats."""
    kind = type(space).__name__
    if kind == "Dict":
        return "\n".join(f"{key}: {observation_text(inner, value[key], digits)}" for key, inner in space.spaces.items())
    if kind == "Tuple":
        return "; ".join(observation_text(s, v, digits) for s, v in zip(space.spaces, value, strict=True))
    if kind == "Text":
        return str(value)
    array = np.asarray(value)
    if array.ndim > 1:
        return "\n".join(_line(row, digits) for row in array.reshape(-1, array.shape[-1]))
    return _line(array.reshape(-1), digits)


def check_observation_space(space: Any, most_numbers: int) -> None:
    """Raise ValueError where observations of a space cannot be written as text, or have more than `most_numbers`."""
    numbers = 0
    for inner in _leaves(space):
        if type(inner).__name__ not in OBSERVATION_SPACES:
            part = "" if inner is space else f" (in {space})"
            raise ValueError(
                f"its observation space {inner}{part} cannot be written as text; "
                f"{', '.join(OBSERVATION_SPACES)} can, or the environment's own text (task.gymnasium.observation=ansi)"
            )
        numbers += 1 if type(inner).__name__ in ("Discrete", "Text") else int(np.prod(inner.shape))
    if numbers > most_numbers:
        raise ValueError(
            f"its observation space {space} has {numbers} numbers, more than task.gymnasium.most_numbers "
            f"({most_numbers}); raise it, or wrap the environment"
        )


def action_format(space: Any, names: Sequence[str] = ()) -> ActionFormat:
    """Return the text form of a space of actions.

    Args:
      space: action space.
      names: names of the actions of a Discrete space, in order; () for numbers.

    Raises:
      ValueError: the space is none of `ACTION_SPACES`, or the names do not fit it.
    """
    kind = type(space).__name__
    if kind not in ACTION_SPACES or (kind == "MultiDiscrete" and len(space.shape) != 1):
        raise ValueError(
            f"its action space {space} cannot be written as text; {', '.join(ACTION_SPACES)} of one dimension can"
        )
    if names and kind != "Discrete":
        raise ValueError(f"task.gymnasium.actions names actions, and its action space {space} has none to name")
    if kind == "Discrete":
        return _discrete(space, [normalize(name) for name in names])
    if kind == "MultiDiscrete":
        return _multi_discrete(space)
    return ActionFormat(
        f"Say a text of {space.min_length} to {space.max_length} characters.",
        lambda text: text.strip() if space.contains(text.strip()) else None,
        lambda rng: "".join(
            rng.choices(sorted(space.character_set), k=rng.randint(space.min_length, space.max_length))
        ),
    )


def normalize(text: str) -> str:
    """Return a text in lower case with single spaces."""
    return " ".join(text.lower().split())


def _discrete(space: Any, names: Sequence[str]) -> ActionFormat:
    start, count = int(space.start), int(space.n)
    if names and (len(names) != count or len(set(names)) != count or not all(names)):
        raise ValueError(
            f"task.gymnasium.actions has {len(names)} names ({', '.join(names)}); its action space {space} needs "
            f"{count} that differ"
        )
    known = dict(zip(names or map(str, range(start, start + count)), range(start, start + count), strict=True))
    if names:
        instruction = f"Say one of: {', '.join(names)}."
    else:
        instruction = f"Say a number from {start} to {start + count - 1}."
    return ActionFormat(instruction, lambda text: known.get(normalize(text)), lambda rng: rng.choice(list(known)))


def _multi_discrete(space: Any) -> ActionFormat:
    lows, counts = np.asarray(space.start).tolist(), np.asarray(space.nvec).tolist()
    ranges = [range(low, low + count) for low, count in zip(lows, counts, strict=True)]

    def read(text: str) -> Any:
        try:
            numbers = [int(word) for word in text.replace(",", " ").split()]
        except ValueError:
            return None
        fits = len(numbers) == len(ranges) and all(n in allowed for n, allowed in zip(numbers, ranges, strict=True))
        return np.asarray(numbers, space.dtype) if fits else None

    bounds = ", ".join(f"{allowed[0]} to {allowed[-1]}" for allowed in ranges)
    return ActionFormat(
        f"Say {len(ranges)} numbers: {bounds}.",
        read,
        lambda rng: " ".join(str(rng.choice(allowed)) for allowed in ranges),
    )


def _leaves(space: Any) -> Iterator[Any]:
    inner = getattr(space, "spaces", None) if type(space).__name__ in ("Dict", "Tuple") else None
    if inner is None:
        yield space
    else:
        yield from itertools.chain(*map(_leaves, inner.values() if isinstance(inner, Mapping) else inner))


def _line(values: np.ndarray, digits: int) -> str:
    if values.dtype.kind in "biu":
        return " ".join(str(int(x)) for x in values)
    return " ".join(f"{float(x):.{digits}g}" for x in values)
