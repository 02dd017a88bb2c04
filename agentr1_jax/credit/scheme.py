"""Credit schemes: their registry, what each needs, and the settings of credit assignment in a config."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from agentr1_jax.credit.batch import Credit, TokenBatch
from agentr1_jax.errors import UserError
from agentr1_jax.registry import Registry
from agentr1_jax.validation import STRICT, NonNegative, Whole, from_section


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
      needs_greedy: True if it reads `batch.greedy_return`.
      needs_samples: True if a row that is sampled once gets no advantage.
      discount_unit: what `gamma` discounts by, `step` or `token`.
    """

    name: str
    function: Callable[..., Credit]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs_critic: bool = False
    uses_critic: bool = False
    needs_state_key: bool = False
    needs_greedy: bool = False
    needs_samples: bool = False
    discount_unit: Literal["step", "token"] = "step"

    def assign(self, batch: TokenBatch) -> Credit:
        """Return advantages and value targets of a batch; pure, to be compiled by the caller."""
        return self.function(batch, **self.arguments)

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Default of each argument of `function`."""
        return {name: parameter.default for name, parameter in list(_parameters(self.function).items())[1:]}

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
            what the annotations of `function` say.
        """
        arguments = {name: value for name, value in arguments.items() if value is not None}
        known = list(self.defaults)
        for name in arguments:
            if name not in known:
                has = f"it has {', '.join(known)}" if known else "it has none"
                raise UserError(f"credit scheme {self.name!r} has no argument {name!r}; {has}")
        checked = from_section(arguments_class(self.function), "credit.args", arguments)
        return dataclasses.replace(self, arguments={name: getattr(checked, name) for name in arguments})


SCHEMES: Registry[Scheme] = Registry("credit scheme", "credit.file")


def register(
    name: str,
    *,
    needs_critic: bool = False,
    uses_critic: bool = False,
    needs_state_key: bool = False,
    needs_greedy: bool = False,
    needs_samples: bool = False,
    discount_unit: Literal["step", "token"] = "step",
) -> Callable[[Callable[..., Credit]], Callable[..., Credit]]:
    """Register the decorated function as the scheme `name`; see `Scheme` for what it may need.

    Raises:
      ValueError: the name is taken.
    """

    def add(function: Callable[..., Credit]) -> Callable[..., Credit]:
        scheme = Scheme(
            name,
            function,
            needs_critic=needs_critic,
            uses_critic=uses_critic or needs_critic,
            needs_state_key=needs_state_key,
            needs_greedy=needs_greedy,
            needs_samples=needs_samples,
            discount_unit=discount_unit,
        )
        SCHEMES.add(name, scheme, function)
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
def _parameters(function: Callable[..., Credit]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


@functools.cache
def arguments_class(function: Callable[..., Credit]) -> type[Any]:
    """Make a dataclass of a scheme's arguments, which checks their types and ranges.

    An argument without annotation has the type of its default.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    fields = [
        (name, hints.get(name, type(parameter.default)), dataclasses.field(default=parameter.default))
        for name, parameter in list(_parameters(function).items())[1:]
    ]
    return dataclass(frozen=True, config=STRICT)(dataclasses.make_dataclass("Arguments", fields, frozen=True))


@dataclass(frozen=True, config=STRICT)
class CreditConfig:
    """The credit scheme of a run.

    Attributes:
      name: name of the scheme, e.g. `grpo`.
      file: Python file of the user's own that registers further schemes; empty for none.
      args: arguments of the scheme; None stands for the scheme's default.
    """

    name: str = "grpo"
    file: str = ""
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)

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
        return SCHEMES[self.name].bind(**self.args)


@dataclass(frozen=True, config=STRICT)
class ShapingConfig:
    """What is done to the rewards of a batch before credit is assigned; see `shaping.py` for the definitions.

    Attributes:
      truncation_is_terminal: True where a limit is part of the task, so that nothing follows a truncated trajectory;
        else a critic values its future.
      terminal_only: True gives the sum of a trajectory's rewards on its last step.
      process_parts: names of the reward parts that are process rewards.
      process_norm: `group` or `batch` normalises process rewards over the steps of each group, or of the batch.
      potential: weight of potential-based shaping; 0 for none.
      overlong_buffer: number of tokens before the limit at which the penalty for length begins; 0 for no penalty.
      overlong_limit: number of tokens at which the penalty is full.
      overlong_factor: the full penalty.
      overlong_unit: whose length counts: a `step`, or the `trajectory`, which pays on its last step.
      scale_returns: True divides rewards by the running standard deviation of returns.
    """

    truncation_is_terminal: bool = False
    terminal_only: bool = False
    process_parts: tuple[str, ...] = ()
    process_norm: Literal["none", "group", "batch"] = "none"
    potential: NonNegative = 0.0
    overlong_buffer: Whole = 0
    overlong_limit: Whole = 0
    overlong_factor: NonNegative = 1.0
    overlong_unit: Literal["step", "trajectory"] = "step"
    scale_returns: bool = False

    def __post_init__(self) -> None:
        if self.process_norm != "none" and not self.process_parts:
            raise ValueError("process_norm needs process_parts, the reward parts that it normalises")
        if self.process_parts and self.process_norm == "none":
            raise ValueError("process_parts is set, but process_norm is none; set process_norm to group or batch")
        if self.terminal_only and (self.process_parts or self.potential):
            raise ValueError(
                "terminal_only moves all reward to the last step, where process_norm and potential would have nothing "
                "left to shape; choose one"
            )
        if self.overlong_buffer and self.overlong_limit < self.overlong_buffer:
            raise ValueError(
                f"overlong_limit ({self.overlong_limit}) must be at least overlong_buffer ({self.overlong_buffer})"
            )
