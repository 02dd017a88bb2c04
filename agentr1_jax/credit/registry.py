"""The registry of credit schemes, by the name used in configs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from agentr1_jax.credit.batch import Credit, CreditBatch


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A registered scheme.

    Attributes:
      name: its name in configs.
      assign: (batch, **hyper-parameters) -> Credit; pure, and compiled by the caller.
      needs_critic: True if it reads `batch.values`.
    """

    name: str
    assign: Callable[..., Credit]
    needs_critic: bool


SCHEMES: dict[str, Scheme] = {}


def register(name: str, *, needs_critic: bool = False) -> Callable[[Callable[..., Credit]], Callable[..., Credit]]:
    """Decorator that adds a scheme under `name`. Raises ValueError if the name is taken."""

    def add(assign: Callable[..., Credit]) -> Callable[..., Credit]:
        if name in SCHEMES:
            raise ValueError(f"credit scheme {name!r} is registered twice")
        SCHEMES[name] = Scheme(name, assign, needs_critic)
        return assign

    return add


def get_scheme(name: str, hyperparameters: Mapping[str, Any]) -> tuple[Scheme, Callable[[CreditBatch], Credit]]:
    """The scheme called `name` and its function with the hyper-parameters bound.

    Args:
      name: a key of `SCHEMES`.
      hyperparameters: keyword arguments of the scheme, e.g. `{"gamma": 1.0, "lam": 0.95}`.

    Raises:
      ValueError: unknown name or hyper-parameter, or a discount outside [0, 1]; the message lists what exists.
    """
    if name not in SCHEMES:
        raise ValueError(f"unknown credit scheme {name!r}; choose one of {', '.join(sorted(SCHEMES))}")
    scheme = SCHEMES[name]
    known = list(inspect.signature(scheme.assign).parameters)[1:]
    unknown = sorted(set(hyperparameters) - set(known))
    if unknown:
        raise ValueError(f"credit scheme {name!r} has no hyper-parameter {unknown[0]!r}; it has {known or 'none'}")
    for key in ("gamma", "lam"):
        if not 0 <= hyperparameters.get(key, 1.0) <= 1:
            raise ValueError(f"credit.{key} is {hyperparameters[key]}; a discount lies in [0, 1]")
    return scheme, functools.partial(scheme.assign, **hyperparameters)
