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
from agentr1_jax.trajectory import Trajectory
from experiments import build
from experiments.circle import Run

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
    run: Run, params: Params, trajectories: Sequence[Trajectory], statistics: RunningMeanStd
) -> tuple[list[Part], float, float]:
    """Shape the rewards of each group as the run does, and compute the values of its critic.

    Rewards are shaped with the discount of the run's own scheme for all of them.

    Args:
      run: config, policy, frozen parameters and mesh are used.
      params: trained parameters.
      trajectories: the batch, in order of group.
      statistics: running statistics of the returns of earlier batches.

    Returns:
      the groups, the fallback baseline of a state (the mean return of earlier batches), and the mean
      |recorded log-prob − log-prob at the parameters|.
    """
    critic, rows = "value" in params, build.learner_config(run.config).packing_config
    groups = [list(group) for _, group in itertools.groupby(trajectories, key=lambda t: t.group)]
    packings = [pack(group, rows, final_values=critic) for group in groups]
    token_outputs = make_token_outputs(run.policy, build.objective(run.config), run.learner_mesh)
    capacity = microbatches(run, packings)
    streams, valued, gaps = [], [], []
    for group, packing in zip(groups, packings, strict=True):
        batch, count = to_device(run, packing, capacity, {})
        outputs: Any = jax.device_get(token_outputs(params, run.frozen, None, batch, count))

        def by_row(x: np.ndarray, packing: Packing = packing) -> np.ndarray:
            return x.reshape(-1, x.shape[-1])[: packing.rows]

        logprobs = gather(packing, by_row(outputs.logprob))
        streams.append(flatten(group, process_parts=run.config.shaping.process_parts))
        gaps.append(np.abs(logprobs - streams[-1].logprobs))
        if critic:
            values, final = (f(packing, by_row(outputs.value)) for f in (gather, gather_final))
            valued.append(dataclasses.replace(streams[-1], values=values.astype(np.float32), final_values=final))
    plain, after = _shape_groups(run, streams, statistics, critic=False)
    with_values = _shape_groups(run, valued, statistics, critic=True)[0] if critic else [None] * len(groups)
    parts = [Part(*part) for part in zip(groups, plain, with_values, packings, strict=True)]
    baseline = statistics.mean / (after.std if run.config.shaping.scale_returns else 1.0)
    return parts, baseline, float(np.concatenate(gaps).mean())


def _shape_groups(
    run: Run, groups: Sequence[FlatTrajectories], statistics: RunningMeanStd, *, critic: bool
) -> tuple[list[FlatTrajectories], RunningMeanStd]:
    """Shape the rewards of all groups at once; return the groups, and the running statistics with them."""
    shaping, gamma = build.shaping(run.config), build.credit_scheme(run.config).gamma
    whole, after = shape_rewards(concatenate(groups), shaping, gamma=gamma, statistics=statistics, bootstraps=critic)
    out = list(groups)
    for name in SHAPED:
        edges = np.cumsum([len(getattr(s, name)) for s in groups])[:-1]
        pieces = np.split(getattr(whole, name), edges)
        out = [dataclasses.replace(s, **{name: piece}) for s, piece in zip(out, pieces, strict=True)]
    return out, after


def microbatches(run: Run, packings: Sequence[Packing]) -> int:
    """Return the most microbatches that one of the groups fills."""
    return max(-(-p.rows // _rows(run)) for p in packings)


def to_device(run: Run, packing: Packing, capacity: int, per_token: Mapping[str, np.ndarray]) -> tuple[Batch, Any]:
    """A group on the learner's mesh with the given fields of its loss tokens, and how many microbatches it fills."""
    rows = _rows(run)
    batch = to_microbatches(packing.packed_tokens, scatter_fields(packing, per_token), microbatches=capacity, rows=rows)
    return meshes.global_batch(batch, run.learner_mesh), np.int32(-(-packing.rows // rows))


def _rows(run: Run) -> int:
    devices = run.learner_mesh.size
    return -(-run.config.learner.rows // devices) * devices
