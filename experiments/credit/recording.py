"""A recorded batch of a run as training saw it: its trajectories, shaped rewards, values, packed rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from agentr1_jax.credit.batch import FlatTrajectories, concatenate, flatten
from agentr1_jax.credit.shaping import RunningMeanStd, replace_rewards, scale_rewards, shape_rewards
from agentr1_jax.errors import UserError
from agentr1_jax.learner.batch import Batch, to_microbatches
from agentr1_jax.learner.packing import Packing, gather, gather_final, pack, scatter_fields
from agentr1_jax.learner.update import make_token_outputs
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.runner import is_zero_variance
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.metrics import read_metrics
from agentr1_jax.runtime.run_folder import RunFolder, read_trajectories
from agentr1_jax.train.build import Setup
from agentr1_jax.train.progress import Progress
from agentr1_jax.train.settings import Settings
from agentr1_jax.trajectory import POLICIES, Trajectory

SHAPED = ("rewards", "returns", "token_rewards", "greedy_return", "truncated")
"""Fields that shaping changes."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One group of the batch.

    Attributes:
      trajectories: trajectories of the group.
      streams: their flat arrays for schemes without a critic.
      valued: their flat arrays with a critic's values, and rewards shaped for a critic; None without a critic.
      packing: layout of the group in packed rows.
    """

    trajectories: Sequence[Trajectory]
    streams: FlatTrajectories
    valued: FlatTrajectories | None
    packing: Packing


class Scale(NamedTuple):
    """What a batch was judged with that earlier batches decide.

    Attributes:
      mean: mean return of earlier batches.
      reward_std: standard deviation of returns that rewards are divided by, for schemes [without, with] a critic; 1 for
        none. Returns of a truncated trajectory differ between them: its future is worth something to a critic alone.
      recorded: True if the run recorded them, and with each step the reward as its credit scheme saw it.
    """

    mean: float = 0.0
    reward_std: tuple[float, float] = (1.0, 1.0)
    recorded: bool = False

    @property
    def baselines(self) -> tuple[float, float]:
        """Fallback baseline of a state for schemes [without, with] a critic."""
        plain, valued = (self.mean / std for std in self.reward_std)
        return plain, valued


def read_batch(folder: str, settings: Settings, update: str) -> tuple[int, list[Trajectory]]:
    """Read a recorded RL batch of a run, in order of group and sample, without groups that others replaced.

    Args:
      folder: folder of the run.
      settings: settings of the run.
      update: `last`, or a number as in the names of the files.

    Raises:
      UserError: no recorded batch of that number, a file that cannot be read.
    """
    run = RunFolder(folder)
    if update != "last" and not update.isdecimal():
        newest = max(run.batch_files())
        raise UserError(f"--update={update}: write `last`, or the number of an update, e.g. --update={newest}")
    ((number, paths),) = run.recorded_batches([-1 if update == "last" else int(update)]).items()
    batch = sorted(read_trajectories(paths), key=lambda t: (t.group, t.sample))
    groups = [list(group) for _, group in itertools.groupby(batch, key=lambda t: t.group)]
    if settings.rollout.dynamic_sampling_groups:
        groups = [group for group in groups if not is_zero_variance(group)]
    return number, [t for group in groups for t in group]


def version(progress: Progress, settings: Settings) -> int:
    """Return the `policy_version` of the parameters of a checkpoint: the number of RL batches learnt from."""
    return {"rl": progress.update, "done": settings.run.updates}.get(progress.phase, 0)


def read_scale(folder: str, update: int, estimate: Scale, *, critic: bool) -> Scale:
    """Read from the metrics of a run what its RL batch `update` was judged with; the estimate where they do not say.

    Args:
      folder: folder of the run.
      update: number of the batch.
      estimate: how the standard deviations of schemes with and without a critic compare, of which the run has recorded
        one.
      critic: whether the run's own scheme has a critic.
    """
    try:
        records = read_metrics(RunFolder(folder).file("metrics.jsonl"))
    except FileNotFoundError:
        return estimate
    for record in reversed(records):
        if record.get("phase") == "rl" and record.get("update") == update + 1 and "credit/baseline" in record:
            own = record["credit/reward_std"]
            plain, valued = (own * std / estimate.reward_std[critic] for std in estimate.reward_std)
            return Scale(record["credit/baseline"] * own, (plain, valued), recorded=True)
    return estimate


def estimate_scale(setup: Setup, statistics: RunningMeanStd, trajectories: Sequence[Trajectory]) -> Scale:
    """Return what a batch is judged with where the running statistics of returns before it are these."""
    settings = setup.settings
    flat = flatten(trajectories, process_parts=settings.shaping.process_parts)

    def std(critic: bool) -> float:
        _, after = shape_rewards(
            flat, settings.shaping, gamma=settings.scheme.gamma, statistics=statistics, bootstraps=critic
        )
        return after.std if settings.shaping.scale_returns else 1.0

    return Scale(statistics.mean, (std(False), std(True)))


def has_values(trajectories: Sequence[Trajectory]) -> bool:
    """Return True if the critic's values of all tokens, and of the futures of truncated trajectories, are recorded."""
    return all(
        all(step.values is not None for step in t.steps)
        and (t.final_value is not None or not POLICIES[t.outcome].bootstrap)
        for t in trajectories
    )


def score_groups(
    setup: Setup, params: Params, trajectories: Sequence[Trajectory], scale: Scale
) -> tuple[list[Part], float]:
    """Return the groups with the rewards and values that training recorded.

    What is not recorded is made anew: rewards are shaped as the run does, with the discount of its own scheme for all
    schemes, and values are those of the critic at the parameters.

    Args:
      setup: settings, policy, frozen parameters and learner mesh are used.
      params: trained parameters.
      trajectories: the batch, in order of group.
      scale: what the batch was judged with.

    Returns:
      the groups, and the mean |recorded log-prob − log-prob at the parameters|.
    """
    critic, rows = "value" in params, setup.settings.learner.packing_config
    groups = [list(group) for _, group in itertools.groupby(trajectories, key=lambda t: t.group)]
    packings = [pack(group, rows, final_values=critic) for group in groups]
    token_outputs = make_token_outputs(setup.policy, setup.settings.objective, setup.learner_mesh)
    capacity, recorded = microbatches(setup, packings), has_values(trajectories)
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
            values, final = (
                _recorded_values(group)
                if recorded
                else (f(packing, by_row(outputs.value)) for f in (gather, gather_final))
            )
            valued.append(dataclasses.replace(streams[-1], values=values.astype(np.float32), final_values=final))
    rewards = _recorded_rewards(trajectories) if scale.recorded else None
    plain = _shape_groups(setup, streams, scale, rewards, critic=False)
    with_values = _shape_groups(setup, valued, scale, rewards, critic=True) if critic else [None] * len(groups)
    parts = [Part(*part) for part in zip(groups, plain, with_values, packings, strict=True)]
    return parts, float(np.concatenate(gaps).mean())


def _recorded_values(group: Sequence[Trajectory]) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of tokens [K] and of futures [N] that training recorded."""
    values = [step.values for t in group for step in t.steps if step.values is not None]
    return np.concatenate(values), np.array([t.final_value or 0.0 for t in group], np.float32)


def _recorded_rewards(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Return the reward of each step as the run's credit scheme saw it, a KL in the reward included."""
    steps = [step for t in trajectories for step in t.steps]
    return np.array([s.reward if s.shaped_reward is None else s.shaped_reward for s in steps], np.float32)


def _shape_groups(
    setup: Setup, groups: Sequence[FlatTrajectories], scale: Scale, recorded: np.ndarray | None, *, critic: bool
) -> list[FlatTrajectories]:
    """Shape the rewards of all groups at once, for schemes with or without a critic."""
    settings = setup.settings
    shaping = dataclasses.replace(settings.shaping, scale_returns=False)

    def shape(critic: bool) -> FlatTrajectories:
        flat, _ = shape_rewards(
            concatenate(groups), shaping, gamma=settings.scheme.gamma, statistics=RunningMeanStd(), bootstraps=critic
        )
        return scale_rewards(flat, scale.reward_std[critic])

    whole, own = shape(critic), settings.learns_values
    if recorded is not None:
        # Beyond a truncation a potential counts for a critic alone, which the run may have had or not.
        unshaped = (recorded - shape(own).rewards) * (scale.reward_std[own] / scale.reward_std[critic])
        whole = replace_rewards(whole, whole.rewards + unshaped)
    out = list(groups)
    for name in SHAPED:
        edges = np.cumsum([len(getattr(s, name)) for s in groups])[:-1]
        pieces = np.split(getattr(whole, name), edges)
        out = [dataclasses.replace(s, **{name: piece}) for s, piece in zip(out, pieces, strict=True)]
    return out


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
