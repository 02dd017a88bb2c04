"""The registry of credit schemes, by the name used in configs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from agentr1_jax.credit.batch import Credit, CreditBatch
from agentr1_jax.credit.primitives import UNITS, WHITENINGS
from agentr1_jax.registry import Registry

DISCOUNTS = ("gamma", "lam", "gamma_high")
AT_LEAST_ZERO = ("step_weight", "outcome_weight", "history", "alpha")
WHOLE = ("history",)
CHOICES: Mapping[str, tuple[str, ...]] = {
    "whiten": WHITENINGS,
    "unit": UNITS,
    "norm": ("mean_norm", "mean_std_norm"),
    "of": ("reward", "return"),
}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A registered scheme.

    Attributes:
      name: its name in configs.
      assign: (batch, **hyper-parameters) -> Credit; pure, and compiled by the caller.
      needs_critic: True if it reads `batch.values`.
      uses_critic: True if it reads and trains them where the run has a critic, and does without where it has none.
      needs_state_key: True if it compares steps of equal `batch.state_key`.
      needs_greedy: True if it reads `batch.greedy_reward`.
      needs_samples: True if it gives a lone sample of a row no advantage.
      token_time: True if its `gamma` discounts by token, and not by step.
    """

    name: str
    assign: Callable[..., Credit]
    needs_critic: bool = False
    uses_critic: bool = False
    needs_state_key: bool = False
    needs_greedy: bool = False
    needs_samples: bool = False
    token_time: bool = False


SCHEMES: Registry[Scheme] = Registry("credit scheme", "credit.file")


def register(
    name: str,
    *,
    needs_critic: bool = False,
    uses_critic: bool = False,
    needs_state_key: bool = False,
    needs_greedy: bool = False,
    needs_samples: bool = False,
    token_time: bool = False,
) -> Callable[[Callable[..., Credit]], Callable[..., Credit]]:
    """Decorator that adds a scheme under `name`; see `Scheme` for what it may need.

    Raises:
      ValueError: the name is taken.
    """

    def add(assign: Callable[..., Credit]) -> Callable[..., Credit]:
        scheme = Scheme(
            name,
            assign,
            needs_critic=needs_critic,
            uses_critic=uses_critic or needs_critic,
            needs_state_key=needs_state_key,
            needs_greedy=needs_greedy,
            needs_samples=needs_samples,
            token_time=token_time,
        )
        SCHEMES.add(name, scheme, assign)
        return assign

    return add


def get_scheme(name: str, hyperparameters: Mapping[str, Any]) -> tuple[Scheme, Callable[[CreditBatch], Credit]]:
    """The scheme called `name` and its function with the hyper-parameters bound.

    Args:
      name: a key of `SCHEMES`.
      hyperparameters: keyword arguments of the scheme, e.g. `{"gamma": 1.0, "lam": 0.95}`.

    Raises:
      ValueError: unknown name or hyper-parameter, a discount outside [0, 1], an unknown unit; the message lists what
        exists.
    """
    scheme = SCHEMES.called(name)
    known = list(inspect.signature(scheme.assign).parameters)[1:]
    for key, value in hyperparameters.items():
        if key not in known:
            raise ValueError(f"credit scheme {name!r} has no hyper-parameter {key!r}; it has {known or 'none'}")
        if key in (*DISCOUNTS, *AT_LEAST_ZERO) and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"credit.args.{key} is {value!r}; it must be a number")
        if key in WHOLE and not isinstance(value, int):
            raise ValueError(f"credit.args.{key} is {value}; it must be a whole number, written without a point")
        if key in DISCOUNTS and not 0 <= value <= 1:
            raise ValueError(f"credit.args.{key} is {value}; a discount lies in [0, 1]")
        if key in AT_LEAST_ZERO and not value >= 0:
            raise ValueError(f"credit.args.{key} is {value}; it must be at least 0")
        if key in CHOICES and value not in CHOICES[key]:
            raise ValueError(f"credit.args.{key} is {value!r}; choose one of {', '.join(CHOICES[key])}")
    return scheme, functools.partial(scheme.assign, **hyperparameters)
