"""What lies on the engine's devices, and the calls of the compiled programs that work on it: numpy in."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.cache import KVCache, cache_sharding, empty_cache
from agentr1_jax.rollout.config import EngineConfig
from agentr1_jax.rollout.programs import Sampled, build_programs
from agentr1_jax.rollout.slots import Slots, idle_slots, to_words
from agentr1_jax.runtime.compile_cache import cached_jit


class Executor:
    """Parameters, cache and slots on a mesh, and its programs, which return before they are done.

    Args:
      policy: the decoder.
      config: shapes.
      mesh: axes `(data, fsdp, tensor)`; lines are sharded over `data`.
    """

    def __init__(self, policy: DecoderConfig, config: EngineConfig, mesh: Mesh) -> None:
        shards = mesh.shape["data"]
        self.programs = build_programs(
            policy, mesh, chunk=config.decode_chunk, block=config.attention_block, together=config.together(shards)
        )
        self.new_cache = cached_jit(
            functools.partial(empty_cache, policy, config.lines(shards), config.length, mesh.shape["tensor"]),
            mesh,
            out_shardings=cache_sharding(policy, mesh),
        )
        self._config = config
        self._by_slot = NamedSharding(mesh, P("data"))
        self._params: Params = None
        self._cache: KVCache | None = None
        self._slots: Slots | None = None

    def open(self, params: Params) -> None:
        """Allocates the cache."""
        c, shards = self._config, self._by_slot.mesh.shape["data"]
        self._params, self._cache = params, self.new_cache()
        self._slots = self._put(idle_slots(c))
        self._nothing_new = self._put(to_words(idle_slots(c), np.zeros(c.slots, bool)))
        self._leave_after = self._put(np.full(shards, c.leave_after, np.int32))

    def use(self, params: Params) -> None:
        """Other parameters from now on."""
        self._params = params

    def close(self) -> None:
        """Frees everything on the devices."""
        self._params = self._cache = self._slots = None

    def copy(self, source: np.ndarray, target: np.ndarray, count: np.ndarray) -> None:
        """See `Programs.copy`."""
        self._cache = self.programs.copy(self._cache, source, target, count)

    def prefill(self, tokens: np.ndarray, line: np.ndarray, start: np.ndarray) -> None:
        """See `Programs.prefill`."""
        self._cache = self.programs.prefill(self._params, self._cache, tokens, line, start)

    def decode(self, words: np.ndarray | None) -> Sampled:
        """See `Programs.decode`; None where there is nothing to say."""
        told = self._nothing_new if words is None else self._put(words)
        call = self._params, self._cache, self._slots, told, self._leave_after
        self._cache, self._slots, out = self.programs.decode(*call)
        return out

    def wait(self) -> None:
        """Until all calls so far are done."""
        jax.block_until_ready((self._cache, self._slots))

    def _put(self, tree: Any) -> Any:
        """Numpy arrays on the mesh, by slot."""
        return jax.device_put(tree, self._by_slot)
