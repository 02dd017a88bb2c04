"""The groups of a recorded batch as training would see them: shaped rewards, values of the critic, packed rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from agentr1_jax.credit.batch import FlatTrajectories, concatenate, flatten
from agentr1_jax.credit.shaping import RunningMeanStd, shape_rewards
from agentr1_jax.learner.batch import Batch, to_microbatches
from agentr1_jax.learner.packing import Packing, gather, gather_final, pack, scatter_fields
from agentr1_jax.learner.update import make_token_outputs
from agentr1_jax.policy.decoder import Params
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.train.build import Setup
from agentr1_jax.trajectory import Trajectory

SHAPED = ("rewards", "returns", "token_rewards", "greedy_return")
"""Fields that shaping changes."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One group of the batch.

    Attributes:
      trajectories: trajectories of the group.
      streams: their flat arrays for schemes without a critic.
      valued: their flat arrays with the critic's values, and rewards shaped for a critic; None without a critic.
      packing: layout of the group in packed rows.
    """

    trajectories: Sequence[Trajectory]
    streams: FlatTrajectories
    valued: FlatTrajectories | None
    packing: Packing


def score_groups(
    setup: Setup, params: Params, trajectories: Sequence[Trajectory], statistics: RunningMeanStd
) -> tuple[list[Part], float, float]:
    """Shape the rewards of each group as the run does, and compute the values of its critic.

    Rewards are shaped with the discount of the run's own scheme for all of them.

    Args:
      setup: settings, policy, frozen parameters and learner mesh are used.
      params: trained parameters.
      trajectories: the batch, in order of group.
      statistics: running statistics of the returns of earlier batches.

    Returns:
      the groups, the fallback baseline of a state (the mean return of earlier batches), and the mean
      |recorded log-prob − log-prob at the parameters|.
    """
    critic, rows = "value" in params, setup.settings.learner.packing_config
    groups = [list(group) for _, group in itertools.groupby(trajectories, key=lambda t: t.group)]
    packings = [pack(group, rows, final_values=critic) for group in groups]
    token_outputs = make_token_outputs(setup.policy, setup.settings.objective, setup.learner_mesh)
    capacity = microbatches(setup, packings)
    streams, valued, gaps = [], [], []
    for group, packing in zip(groups, packings, strict=True):
        batch, count = to_device(setup, packing, capacity, {})
        outputs: Any = jax.device_get(token_outputs(params, setup.frozen, None, batch, count))

        def by_row(x: np.ndarray, packing: Packing = packing) -> np.ndarray:
            return x.reshape(-1, x.shape[-1])[: packing.rows]

        logprobs = gather(packing, by_row(outputs.logprob))
        streams.append(flatten(group, process_parts=setup.settings.shaping.process_parts))
        gaps.append(np.abs(logprobs - streams[-1].logprobs))
        if critic:
            values, final = (f(packing, by_row(outputs.value)) for f in (gather, gather_final))
            valued.append(dataclasses.replace(streams[-1], values=values.astype(np.float32), final_values=final))
    plain, after = _shape_groups(setup, streams, statistics, critic=False)
    with_values = _shape_groups(setup, valued, statistics, critic=True)[0] if critic else [None] * len(groups)
    parts = [Part(*part) for part in zip(groups, plain, with_values, packings, strict=True)]
    baseline = statistics.mean / (after.std if setup.settings.shaping.scale_returns else 1.0)
    return parts, baseline, float(np.concatenate(gaps).mean())


def _shape_groups(
    setup: Setup, groups: Sequence[FlatTrajectories], statistics: RunningMeanStd, *, critic: bool
) -> tuple[list[FlatTrajectories], RunningMeanStd]:
    """Shape the rewards of all groups at once; return the groups, and the running statistics with them."""
    shaping, gamma = setup.settings.shaping, setup.settings.scheme.gamma
    whole, after = shape_rewards(concatenate(groups), shaping, gamma=gamma, statistics=statistics, bootstraps=critic)
    out = list(groups)
    for name in SHAPED:
        edges = np.cumsum([len(getattr(s, name)) for s in groups])[:-1]
        pieces = np.split(getattr(whole, name), edges)
        out = [dataclasses.replace(s, **{name: piece}) for s, piece in zip(out, pieces, strict=True)]
    return out, after


def microbatches(setup: Setup, packings: Sequence[Packing]) -> int:
    """Return the most microbatches that one of the groups fills."""
    return max(-(-p.rows // _rows(setup)) for p in packings)


def to_device(setup: Setup, packing: Packing, capacity: int, per_token: Mapping[str, np.ndarray]) -> tuple[Batch, Any]:
    """Return a group on the learner's mesh, with some fields of its loss tokens, and the microbatches that it fills."""
    rows = _rows(setup)
    batch = to_microbatches(packing.packed_tokens, scatter_fields(packing, per_token), microbatches=capacity, rows=rows)
    return meshes.global_batch(batch, setup.learner_mesh), np.int32(-(-packing.rows // rows))


def _rows(setup: Setup) -> int:
    devices = setup.learner_mesh.size
    return -(-setup.settings.learner.rows // devices) * devices
