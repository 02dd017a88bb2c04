"""A recorded batch of a run as training would see it: its trajectories, shaped rewards, values, packed rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from agentr1_jax.credit.batch import FlatTrajectories, concatenate, flatten
from agentr1_jax.credit.shaping import RunningMeanStd, shape_rewards
from agentr1_jax.errors import UserError
from agentr1_jax.learner.batch import Batch, to_microbatches
from agentr1_jax.learner.packing import Packing, gather, gather_final, pack, scatter_fields
from agentr1_jax.learner.update import make_token_outputs
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.runner import is_zero_variance
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.run_folder import RunFolder, read_trajectories
from agentr1_jax.train import train_step
from agentr1_jax.train.build import Setup
from agentr1_jax.train.phases import Phase
from agentr1_jax.train.progress import Progress
from agentr1_jax.train.settings import Settings
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


def read_batch(folder: str, settings: Settings, update: str) -> tuple[int, list[Trajectory]]:
    """Read a recorded RL batch of a run, in order of group and sample, without groups that others replaced.

    Args:
      folder: folder of the run.
      settings: settings of the run.
      update: `last`, or a number as in the names of the files.

    Raises:
      UserError: no recorded batch of that number, a file that cannot be read.
    """
    recorded = RunFolder(folder).batch_files()
    if update != "last" and not update.isdecimal():
        raise UserError(f"--update={update}: write `last`, or the number of an update, e.g. --update={max(recorded)}")
    number = max(recorded) if update == "last" else int(update)
    if number not in recorded:
        raise UserError(
            f"{folder}: has no RL batch {number}; those from {min(recorded)} to {max(recorded)} are recorded"
        )
    batch = sorted(read_trajectories(recorded[number]), key=lambda t: (t.group, t.sample))
    groups = [list(group) for _, group in itertools.groupby(batch, key=lambda t: t.group)]
    if settings.rollout.dynamic_sampling_groups:
        groups = [group for group in groups if not is_zero_variance(group)]
    return number, [t for group in groups for t in group]


def version(progress: Progress, settings: Settings) -> int:
    """Return the `policy_version` of the parameters of a checkpoint: the number of RL batches learnt from."""
    return {"rl": progress.update, "done": settings.run.updates}.get(progress.phase, 0)


def statistics_before(
    setup: Setup, phase: Phase, progress: Progress, trajectories: Sequence[Trajectory]
) -> tuple[RunningMeanStd, list[str]]:
    """Return the statistics of the returns of all batches that a checkpoint had learnt from, but for the one compared.

    Training judges a batch by what it knew before: a baseline that has seen a return is not independent of it.

    Args:
      setup: settings and policy are used.
      phase: reinforcement learning, as the run trains.
      progress: record of the checkpoint, which may be older than the batch.
      trajectories: all that training had of the batch.

    Returns:
      the statistics; where the batch cannot be separated, they include it, and a note says so.
    """
    settings, statistics = setup.settings, RunningMeanStd(*progress.return_statistics)
    known = [t for t in trajectories if any(s.policy_version < version(progress, settings) for s in t.steps)]
    usable, _, _ = train_step.sift(setup, phase, known)
    if not usable:
        return statistics, []
    shaping, gamma = settings.shaping, settings.scheme.gamma
    streams = flatten(usable, process_parts=shaping.process_parts)
    _, own = shape_rewards(streams, shaping, gamma=gamma, statistics=RunningMeanStd(), bootstraps=phase.critic)
    if own.n > statistics.n or settings.objective.kl_in_reward != "none":
        unsure = "The running statistics of returns hold this batch's too, which cannot be told apart"
        return statistics, [f"{unsure} (a KL in the reward is not recorded)."]
    return statistics.remove(own), []


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
