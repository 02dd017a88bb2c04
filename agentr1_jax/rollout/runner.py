"""Running many trajectories on one engine: groups of samples of one task row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from absl import logging

from agentr1_jax.agents.base import Agent, Completion, Row
from agentr1_jax.agents.session import Identity, RecordedSession
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.engine import Engine, RequestError
from agentr1_jax.trajectory import Outcome, Trajectory


class EngineSession(RecordedSession):
    """A session whose responses come from a slot of the engine."""

    def __init__(self, engine: Engine, slot: int, identity: Identity, temperature: float, policy_version: int) -> None:
        super().__init__(identity, policy_version)
        self._engine = engine
        self._slot = slot
        self._temperature = temperature

    async def respond(self, prompt_ids: np.ndarray, max_tokens: int, stop: Sequence[Sequence[int]]) -> Completion:
        key = np.random.SeedSequence([self.seed, len(self._steps)]).generate_state(2, np.uint32)
        return await self._engine.generate(
            self._slot, prompt_ids, max_tokens, temperature=self._temperature, key=key, stop=stop
        )


def run_groups(
    engine: Engine,
    params: Params,
    agent: Agent,
    rows: Sequence[Row],
    identities: Sequence[Sequence[Identity]],
    *,
    temperature: float,
    policy_version: int,
    on_finish: Callable[[Trajectory], None] = lambda trajectory: None,
) -> list[Trajectory]:
    """Samples a group of trajectories for each row.

    Args:
      engine: its slots are shared by all trajectories; each keeps its slot until it ends.
      params: decoder parameters on the engine's mesh.
      agent: the workflow of one trajectory.
      rows: one task row per group.
      identities: for each row, one identity per sample.
      temperature: of sampling; 0 is greedy.
      policy_version: recorded in every step.
      on_finish: called with each trajectory as it ends.

    Returns:
      trajectories sorted by (group, sample). What an agent, environment or tool raises ends its own trajectory only,
      as `env_failure` (`engine_failure` where the engine refused its request), with the error in `info`.
    """

    async def episode(row: Row, identity: Identity) -> Trajectory:
        slot = await engine.acquire()
        session = EngineSession(engine, slot, identity, temperature, policy_version)
        try:
            await agent.run(session, row)
            trajectory = session.trajectory()
        except Exception as error:  # A bad rollout is data, not a crash.
            logging.exception("%s failed", identity.uid)
            ours = isinstance(error, RequestError)
            trajectory = session.abandoned(Outcome.ENGINE_FAILURE if ours else Outcome.ENV_FAILURE, error)
        finally:
            engine.release(slot)
        on_finish(trajectory)
        return trajectory

    work = [episode(row, i) for row, samples in zip(rows, identities, strict=True) for i in samples]
    return sorted(engine.run(params, work), key=lambda t: (t.group, t.sample))
