"""State of an episode: the function sets of its row, and digests by which states are compared."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentr1_jax.contrib.bfcl.file_system import FileSystem
from agentr1_jax.contrib.bfcl.math_tools import MathTools
from agentr1_jax.contrib.bfcl.messages import Messages
from agentr1_jax.contrib.bfcl.posting import Posting
from agentr1_jax.contrib.bfcl.tickets import Tickets

FUNCTION_SETS: Mapping[str, Any] = {
    "GorillaFileSystem": FileSystem,
    "MathAPI": MathTools,
    "MessageAPI": Messages,
    "TicketAPI": Tickets,
    "TwitterAPI": Posting,
}
"""Class name in the data -> its implementation."""

NOT_COMPARED = {"GorillaFileSystem": ("cwd",)}
"""Fields that the comparison with the ground truth leaves out: the working directory is only a means."""


class World:
    """The state of one episode: function sets `classes`, each made from its part of `config`, by default empty.

    Raises:
      ValueError: a config is invalid; the message names the place.
    """

    def __init__(self, classes: Sequence[str], config: Mapping[str, Any]) -> None:
        own = copy.deepcopy({name: config.get(name, {}) for name in classes})
        self._sets = {name: FUNCTION_SETS[name].from_config(own[name]) for name in classes}

    def call(self, name: str, function: str, arguments: Mapping[str, Any]) -> Any:
        """Call a function of the set `name`; its JSON may share parts with the state. Raises CallFailed."""
        return getattr(self._sets[name], function)(**copy.deepcopy(dict(arguments)))

    def state(self) -> dict[str, Any]:
        """Return the whole state as plain JSON; equal states have equal results, up to the order of folder entries."""
        return {name: dataclasses.asdict(of) for name, of in self._sets.items()}

    def digests(self) -> dict[str, str]:
        """Return the digest of the whole `state`, and of the part that is `compared` with the ground truth."""
        state = self.state()
        compared = {
            name: {key: x for key, x in of.items() if key not in NOT_COMPARED.get(name, ())}
            for name, of in state.items()
        }
        return {"state": _digest(state), "compared": _digest(compared)}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
