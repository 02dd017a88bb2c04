"""A function of an episode as a Tool."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from agentr1_jax.contrib.bfcl.base import CallFailed
from agentr1_jax.contrib.bfcl.documents import Function
from agentr1_jax.contrib.bfcl.state import World
from agentr1_jax.tools import base
from agentr1_jax.tools.base import ToolResult


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionTool:
    """One function on one episode's state. Results are JSON; their data are the digests of the state after the call.

    It runs on the event loop, at once: no time limit breaks it off, so that no call is applied twice.

    Attributes:
      world: the state, shared by the episode's tools.
      owner: name of the function set.
      function: its document.
      scope: the row, by which recorded calls are told apart.
    """

    world: World
    owner: str
    function: Function
    scope: str
    blocking: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The function's."""
        return self.function.name

    @property
    def description(self) -> str:
        """What its document says."""
        return self.function.description

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON Schema of its arguments."""
        return self.function.parameters

    def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Applies the call to the state."""
        try:
            result = self.world.call(self.owner, self.name, self.function.given(arguments))
        except CallFailed as error:
            told = base.failed(error.kind, f"Error: {self.name}: {error}")
        else:
            told = ToolResult(json.dumps(result, ensure_ascii=False))
        return dataclasses.replace(told, data=self.world.digests())
