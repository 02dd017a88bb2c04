"""Credit schemes: their registry, what each needs, and the section `credit` of a config."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax.numpy as jnp
from pydantic.dataclasses import dataclass

from agentr1_jax.credit.batch import Credit, TokenBatch
from agentr1_jax.errors import UserError
from agentr1_jax.registry import Registry
from agentr1_jax.validation import STRICT, from_section


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A credit scheme with its arguments.

    Attributes:
      name: its name in configs.
      function: (batch, **arguments) -> Credit; pure.
      arguments: those that differ from the defaults of `function`.
      needs_critic: True if it reads `batch.values`.
      uses_critic: True if it reads and trains a critic where the run has one, and works without one, too.
      needs_state_key: True if it compares steps of equal `batch.state_key`.
      needs_action_key: True if it compares steps of equal `batch.action_key`.
      needs_greedy: True if it reads `batch.greedy_return`.
      needs_samples: True if a row that is sampled once gets no advantage.
      needs_belief: True if it reads `batch.belief`, so that a run has to probe it. A scheme with an argument `frozen`
        takes only the frozen reference's, unless that is False.
      discount_unit: what `gamma` discounts by, `step` or `token`.
      exclusive: names of arguments of which one at most may be set.
    """

    name: str
    function: Callable[..., Credit]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs_critic: bool = False
    uses_critic: bool = False
    needs_state_key: bool = False
    needs_action_key: bool = False
    needs_greedy: bool = False
    needs_samples: bool = False
    needs_belief: bool = False
    discount_unit: Literal["step", "token"] = "step"
    exclusive: tuple[str, ...] = ()

    def assign(self, batch: TokenBatch) -> Credit:
        """Return advantages, value targets and terms of a batch; pure, to be compiled by the caller.

        Raises:
          UserError: a quantity of a term is not [steps].
        """
        credit = self.function(batch, **self.arguments)
        terms = (
            OrderedDict()
        )  # Compiled functions return a dict by the order of its names, and an OrderedDict as it is.
        for name, term in credit.terms.items():
            terms[name] = term._replace(plus=OrderedDict(term.plus), minus=OrderedDict(term.minus))
            for quantity, x in {**term.plus, **term.minus, "weight": term.weight, "std": term.std}.items():
                if jnp.shape(x) not in ((), (batch.steps,)):
                    raise UserError(
                        f"credit scheme {self.name!r}: {quantity!r} of the term {name!r} has shape {jnp.shape(x)}, and "
                        f"terms are of the {batch.steps} steps; see broadcast_to_steps and mean_of_tokens"
                    )
        return dataclasses.replace(credit, terms=terms)

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Default of each argument of `function`."""
        return {field.name: field.default for field in dataclasses.fields(arguments_class(self.function))}

    @property
    def needs_frozen_belief(self) -> bool:
        """True if beliefs must be those of the frozen reference."""
        return self.needs_belief and bool({**self.defaults, **self.arguments}.get("frozen", False))

    @property
    def gamma(self) -> float:
        """Discount per step; 1 for a scheme that has none, or discounts by token."""
        if self.discount_unit == "token":
            return 1.0
        known = {**self.defaults, **self.arguments}
        return float(known.get("gamma_high", known.get("gamma", 1.0)))

    def bind(self, /, **arguments: Any) -> Scheme:
        """Return the scheme with other arguments; None stands for a default.

        Raises:
          UserError: the scheme has no such argument, or its value is of another type or out of its range, which is
            what the annotations of `function` say, or two arguments exclude each other.
        """
        arguments = {name: value for name, value in arguments.items() if value is not None}
        known = list(self.defaults)
        for name in arguments:
            if name not in known:
                has = f"it has {', '.join(known)}" if known else "it has none"
                raise UserError(f"credit scheme {self.name!r} has no argument {name!r}; {has}")
        if len(both := [name for name in self.exclusive if name in arguments]) > 1:
            raise UserError(f"credit scheme {self.name!r}: set one of {' and '.join(both)}, and the other to None")
        checked = from_section(arguments_class(self.function), "credit.args", arguments)
        return dataclasses.replace(self, arguments={name: getattr(checked, name) for name in arguments})


ANSWER = "{answer}"
"""Place of the gold answer in `credit.probe_text`."""
SCHEMES: Registry[Scheme] = Registry("credit scheme", "credit.file")


def register(name: str, **needs: Any) -> Callable[[Callable[..., Credit]], Callable[..., Credit]]:
    """Register the decorated function as the scheme `name`; `needs` are fields of `Scheme`, e.g. `needs_critic=True`.

    Raises:
      ValueError: the name is taken.
    """

    def add(function: Callable[..., Credit]) -> Callable[..., Credit]:
        SCHEMES.add(name, Scheme(name, function, **{"uses_critic": needs.get("needs_critic", False)} | needs), function)
        return function

    return add


def get_scheme(name: str, /, **arguments: Any) -> Scheme:
    """Return the scheme `name` with arguments, e.g. `get_scheme("step_gae", lam=0.95)`.

    Raises:
      ValueError: there is no such scheme; the message lists the names.
      UserError: see `Scheme.bind`.
    """
    return SCHEMES.get_entry(name).bind(**arguments)


@functools.cache
def arguments_class(function: Callable[..., Credit]) -> type[Any]:
    """Make a dataclass of a scheme's arguments, which checks their types and ranges.

    An argument without annotation has the type of its default.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    _, *parameters = inspect.signature(function).parameters.values()
    fields = [(p.name, hints.get(p.name, type(p.default)), dataclasses.field(default=p.default)) for p in parameters]
    return dataclass(frozen=True, config=STRICT)(dataclasses.make_dataclass("Arguments", fields, frozen=True))


@dataclass(frozen=True, config=STRICT)
class CreditConfig:
    """Section `credit`: the scheme of a run, the user's file that may register it, its arguments, and the probes."""

    name: str = "grpo"
    file: str = ""
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    probe: Literal["none", "policy", "reference"] = "none"
    probe_text: str = ""

    def __post_init__(self) -> None:
        if self.probe_text and self.probe_text.count(ANSWER) != 1:
            raise ValueError(f"probe_text is {self.probe_text!r}; write {ANSWER} where the gold answer stands, once")

    def bind(self) -> Scheme:
        """Load `file` and return the scheme with its arguments.

        Raises:
          UserError: the file does not load, or there is no such scheme or argument; the message lists those there are.
        """
        try:
            if self.file:
                SCHEMES.load(self.file)
        except ValueError as error:
            raise UserError(str(error)) from error
        if self.name not in SCHEMES:
            raise UserError(f"credit.name: unknown credit scheme {self.name!r}; choose one of {', '.join(SCHEMES)}")
        return get_scheme(self.name, **self.args)
