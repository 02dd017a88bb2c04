"""Context rules: how the next prompt is built from what happened, C(z₀..zₜ) → ids. They only concatenate ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Turn:
    """One finished step: int32 ids of the response and of the rendered observation after it (glue included)."""

    response_ids: np.ndarray
    observation_ids: np.ndarray


ContextRule = Callable[[np.ndarray, Sequence[Turn]], np.ndarray]


def append(opening: np.ndarray, turns: Sequence[Turn]) -> np.ndarray:
    """Everything so far: each prompt extends the one before."""
    return np.concatenate([opening, *(part for t in turns for part in (t.response_ids, t.observation_ids))])


def window(opening: np.ndarray, turns: Sequence[Turn], *, k: int) -> np.ndarray:
    """The opening and the last `k` turns; older ones are dropped whole."""
    return append(opening, turns[max(0, len(turns) - k) :])


def context_rule(spec: str) -> ContextRule:
    """The rule named by a config value: `append` or `window(3)`.

    Raises:
      ValueError: unknown name or bad argument; the message lists what exists.
    """
    name, _, argument = spec.partition("(")
    if spec == "append":
        return append
    if name == "window" and argument.endswith(")") and argument[:-1].isdecimal() and int(argument[:-1]) > 0:
        k = int(argument[:-1])
        return lambda opening, turns: window(opening, turns, k=k)
    raise ValueError(f"unknown context rule {spec!r}; choose 'append' or 'window(k)' with k >= 1, e.g. 'window(3)'")
