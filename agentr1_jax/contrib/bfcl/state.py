"""The state of an episode: the function sets of its row, and how two states compare."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentr1_jax.contrib.bfcl.base import FunctionSet
from agentr1_jax.contrib.bfcl.file_system import FileSystem
from agentr1_jax.contrib.bfcl.math_tools import MathTools
from agentr1_jax.contrib.bfcl.messages import Messages
from agentr1_jax.contrib.bfcl.posting import Posting
from agentr1_jax.contrib.bfcl.tickets import Tickets

FUNCTION_SETS: Mapping[str, type[FunctionSet]] = {
    "GorillaFileSystem": FileSystem,
    "MathAPI": MathTools,
    "MessageAPI": Messages,
    "TicketAPI": Tickets,
    "TwitterAPI": Posting,
}
"""By the names of the data."""

NOT_COMPARED = {"GorillaFileSystem": ("cwd",)}
"""What is not part of an outcome: where one stands in the tree is a means."""


class World:
    """The state of one episode.

    Args:
      classes: names of the function sets.
      config: their initial configs, by name; one that is missing is empty.

    Raises:
      ValueError: a config is none; the message says where.
    """

    def __init__(self, classes: Sequence[str], config: Mapping[str, Any]) -> None:
        own = copy.deepcopy({name: config.get(name, {}) for name in classes})
        self._sets = {name: FUNCTION_SETS[name].from_config(own[name]) for name in classes}

    def call(self, name: str, function: str, arguments: Mapping[str, Any]) -> Any:
        """What a function of the set `name` returns, JSON that the state may share. Raises CallFailed."""
        return getattr(self._sets[name], function)(**copy.deepcopy(dict(arguments)))

    def state(self) -> dict[str, Any]:
        """All of it, plain JSON: equal states lead to equal results, but for the order of a folder's entries."""
        return {name: dataclasses.asdict(of) for name, of in self._sets.items()}

    def digests(self) -> dict[str, str]:
        """`state`, equal where all is equal, and `outcome`, equal where all is equal that an outcome has."""
        state = self.state()
        outcome = {
            name: {key: x for key, x in of.items() if key not in NOT_COMPARED.get(name, ())}
            for name, of in state.items()
        }
        return {"state": _digest(state), "outcome": _digest(outcome)}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
