"""One engine over the devices of several processes, all of which must call its programs alike.

    the leader:  Engine -> Device -> Leading -> its devices
                                        |
                                     messages
                                        v
    each other one:                  follow  -> its devices

The leader runs agents and tools, and decides everything; the others have no engine to speak of. A message holds the
calls of a whole turn, and goes before the leader makes them itself: in a program over all devices it may wait for the
others, who must know by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.config import EngineConfig
from agentr1_jax.rollout.executor import Executor
from agentr1_jax.rollout.programs import Sampled

Call = tuple[str, Sequence[Any]]
"""A method of `Executor` and its arguments; parameters stay out, since each process has its own part of them."""


class Leading(Executor):
    """An executor that tells those of the other processes of its mesh what to do.

    Args:
      policy, config, mesh: of `Executor`.
      tell: hands a list of `Call` to all of them.
    """

    def __init__(
        self, policy: DecoderConfig, config: EngineConfig, mesh: Mesh, tell: Callable[[list[Call]], None]
    ) -> None:
        super().__init__(policy, config, mesh)
        self._tell = tell
        self._turn: list[Call] = []

    def open(self, params: Params) -> None:
        """See `Executor.open`."""
        self._tell([("open", ())])
        super().open(params)

    def use(self, params: Params) -> None:
        """Refused: the others would have to have new parameters at the same turn."""
        raise RuntimeError("an engine over several processes keeps its parameters while it rolls out")

    def close(self) -> None:
        """See `Executor.close`."""
        if self._cache is not None:
            self._tell([("close", ())])
        self._turn = []
        super().close()

    def copy(self, source: np.ndarray, target: np.ndarray, count: np.ndarray) -> None:
        """Waits for the `decode` of its turn."""
        self._turn.append(("copy", (source, target, count)))

    def prefill(self, tokens: np.ndarray, line: np.ndarray, start: np.ndarray) -> None:
        """Waits for the `decode` of its turn."""
        self._turn.append(("prefill", (tokens, line, start)))

    def decode(self, words: np.ndarray | None) -> Sampled:
        """See `Executor.decode`; before it, all calls of the turn."""
        self._begin([("decode", (words,))])
        return super().decode(words)

    def wait(self) -> None:
        """See `Executor.wait`."""
        self._begin([])
        super().wait()

    def _begin(self, last: list[Call]) -> None:
        turn, self._turn = self._turn, []
        if turn or last:
            self._tell(turn + last)
        for name, arguments in turn:
            getattr(super(), name)(*arguments)


def follow(executor: Executor, params: Params, messages: Iterable[list[Call]]) -> None:
    """Makes the calls of the process that leads until it has no more, with this process's part of the parameters."""
    try:
        for calls in messages:
            for name, arguments in calls:
                getattr(executor, name)(*((params,) if name == "open" else arguments))
    finally:
        executor.close()
