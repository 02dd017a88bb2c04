"""The groups of a recorded batch as training would see them, for credit schemes to judge."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from agentr1_jax.credit.flatten import FlatTrajectories, concatenate, flatten
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
      streams: as schemes without a critic see them.
      valued: with the critic's values, and rewards shaped for a scheme that uses them; None without a critic.
      packing: how the group lies in rows.
    """

    trajectories: Sequence[Trajectory]
    streams: FlatTrajectories
    valued: FlatTrajectories | None
    packing: Packing


def scored_parts(
    run: Run, params: Params, trajectories: Sequence[Trajectory], moments: RunningMeanStd
) -> tuple[list[Part], float, float]:
    """The groups of a batch, their rewards shaped as the run shapes them, with the values of its critic.

    Rewards are shaped with the discount of the run's own scheme for all of them.

    Args:
      run: config, policy, frozen parameters and mesh are used.
      params: trained parameters.
      trajectories: the batch, by group.
      moments: of the returns of earlier batches.

    Returns:
      the groups, what training takes a state to be worth of which nothing else is known, and the mean |log-prob as
      recorded − log-prob at the parameters|.
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
    plain, after = _shaped(run, streams, moments, critic=False)
    with_values = _shaped(run, valued, moments, critic=True)[0] if critic else [None] * len(groups)
    parts = [Part(*part) for part in zip(groups, plain, with_values, packings, strict=True)]
    baseline = moments.mean / (after.std if run.config.shaping.scale_returns else 1.0)
    return parts, baseline, float(np.concatenate(gaps).mean())


def _shaped(
    run: Run, groups: Sequence[FlatTrajectories], moments: RunningMeanStd, *, critic: bool
) -> tuple[list[FlatTrajectories], RunningMeanStd]:
    """The groups with shaped rewards, and moments with them; over the whole batch, at all of which some tools look."""
    shaping, gamma = build.shaping(run.config), build.credit_scheme(run.config).gamma
    whole, after = shape_rewards(concatenate(groups), shaping, gamma=gamma, statistics=moments, bootstraps=critic)
    out = list(groups)
    for name in SHAPED:
        edges = np.cumsum([len(getattr(s, name)) for s in groups])[:-1]
        pieces = np.split(getattr(whole, name), edges)
        out = [dataclasses.replace(s, **{name: piece}) for s, piece in zip(out, pieces, strict=True)]
    return out, after


def microbatches(run: Run, packings: Sequence[Packing]) -> int:
    """Most microbatches that one of the groups fills."""
    return max(-(-p.rows // _rows(run)) for p in packings)


def to_device(run: Run, packing: Packing, capacity: int, per_token: Mapping[str, np.ndarray]) -> tuple[Batch, Any]:
    """A group on the learner's mesh with the given fields of its loss tokens, and how many microbatches it fills."""
    rows = _rows(run)
    batch = to_microbatches(packing.packed_tokens, scatter_fields(packing, per_token), microbatches=capacity, rows=rows)
    return meshes.global_batch(batch, run.learner_mesh), np.int32(-(-packing.rows // rows))


def _rows(run: Run) -> int:
    devices = run.learner_mesh.size
    return -(-run.config.learner.rows // devices) * devices
