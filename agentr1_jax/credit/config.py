"""Settings of credit assignment: the sections `credit` and `shaping` of a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from agentr1_jax.credit.scheme import SCHEMES, Scheme
from agentr1_jax.errors import UserError
from agentr1_jax.validation import STRICT, NonNegative, Whole


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
