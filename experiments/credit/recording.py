"""Recorded batches of runs, and the parameters that belong to them."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from agentr1_jax import files
from agentr1_jax.credit.batch import flatten as flatten_trajectories
from agentr1_jax.credit.shaping import RunningMeanStd, shape_rewards
from agentr1_jax.errors import UserError
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.runner import is_zero_variance
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.run_folder import RunFolder, read_trajectories
from agentr1_jax.train import train_step
from agentr1_jax.train.build import Setup
from agentr1_jax.train.phases import Phase
from agentr1_jax.train.progress import Progress, read_progress
from agentr1_jax.train.restore import restore_params
from agentr1_jax.train.settings import Settings
from agentr1_jax.trajectory import Trajectory
from experiments.setup import read_run, read_settings

POLICY_KEYS = ("policy", "tokenizer", "critic", "context", "rollout.temperature", "rollout.top_k", "rollout.top_p")
"""Keys and sections of a config in which recordings of one policy agree."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """RL batches of one run.

    Attributes:
      folder: folder of the run.
      config: config of the run as plain JSON.
      settings: settings of the run.
      updates: numbers of the batches.
      trajectories: all trajectories that training used; groups of different batches have different numbers.
    """

    folder: str
    config: Mapping[str, Any]
    settings: Settings
    updates: Sequence[int]
    trajectories: Sequence[Trajectory]


def read_recording(folder: str, updates: str) -> Recording:
    """Read recorded RL batches of a run.

    Args:
      folder: folder of the run.
      updates: `last`, or numbers as in the names of the files, with commas between them.

    Raises:
      UserError: no run, no recorded batch of that number, a file that cannot be read.
    """
    config, recorded = read_run(folder), RunFolder(folder).batch_files()
    settings = read_settings(config)
    if updates != "last" and not re.fullmatch(r"\d+(,\d+)*", updates):
        raise UserError(f"--update={updates}: write `last`, or the number of an update, e.g. --update={max(recorded)}")
    wanted = [max(recorded)] if updates == "last" else sorted({int(update) for update in updates.split(",")})
    for update in wanted:
        if update not in recorded:
            raise UserError(
                f"{folder}: has no RL batch {update}; those from {min(recorded)} to {max(recorded)} are recorded"
            )
    trajectories: list[Trajectory] = []
    for update in wanted:
        batch = _drop_replaced_groups(settings, read_trajectories(recorded[update]))
        trajectories += _renumber_groups(batch, 1 + max((t.group for t in trajectories), default=-1))
    return Recording(folder, configs.resolve(config), settings, wanted, trajectories)


def _drop_replaced_groups(settings: Settings, batch: Sequence[Trajectory]) -> list[Trajectory]:
    """Drop zero-variance groups, in whose place others were sampled."""
    if not settings.rollout.dynamic_sampling_groups:
        return list(batch)
    groups: dict[int, list[Trajectory]] = {}
    for t in batch:
        groups.setdefault(t.group, []).append(t)
    return [t for group in groups.values() if not is_zero_variance(group) for t in group]


def _renumber_groups(batch: Sequence[Trajectory], first: int) -> list[Trajectory]:
    """Sort trajectories by group and sample, and number the groups from `first`."""
    order = sorted(batch, key=lambda t: (t.group, t.sample))
    number = np.unique([t.group for t in order], return_inverse=True)[1]
    return [dataclasses.replace(t, group=first + int(g)) for t, g in zip(order, number, strict=True)]


def join(recordings: Sequence[Recording]) -> list[Trajectory]:
    """Join the trajectories of several runs: groups are renumbered, uids begin with the name of their run."""
    out: list[Trajectory] = []
    for r in recordings:
        prefix = f"{os.path.basename(os.path.normpath(r.folder))}:" if len(recordings) > 1 else ""
        batch = _renumber_groups(r.trajectories, 1 + max((t.group for t in out), default=-1))
        out += [dataclasses.replace(t, uid=f"{prefix}{t.uid}") for t in batch]
    return out


def check_one_policy(recordings: Sequence[Recording]) -> None:
    """Refuse to join recordings of different policies.

    Parameters are compared by `newest_params`, since they take time and memory to read.

    Raises:
      UserError: with what differs, and where.
    """
    first = recordings[0]
    for r in recordings[1:]:
        differing = [
            f"{key} is {here!r} in {first.folder} and {there!r} in {r.folder}"
            for key, here, there in _differences(first.config, r.config)
        ]
        if _tokenizer_bytes(first.folder) != _tokenizer_bytes(r.folder):
            differing.append(f"tokenizer.model differs between {first.folder} and {r.folder}")
        if differing:
            raise UserError(f"recordings of different policies: {'; '.join(differing)}. Compare schemes on one of them")
    versions: dict[int, str] = {}
    for r in recordings:
        for t in r.trajectories:
            versions |= {s.policy_version: r.folder for s in t.steps if s.policy_version not in versions}
    if len(versions) > 1:
        listed = ", ".join(f"version {version} ({folder})" for version, folder in sorted(versions.items()))
        raise UserError(f"recordings of different policies: {listed}; choose one update of one policy with --update=U")


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    here, there = dict(configs.flatten(one)), dict(configs.flatten(other))
    keys = [k for k in sorted(here.keys() | there.keys()) if any(k == p or k.startswith(f"{p}.") for p in POLICY_KEYS)]
    return [(k, here.get(k), there.get(k)) for k in keys if here.get(k) != there.get(k)]


def _tokenizer_bytes(folder: str) -> bytes:
    path = os.path.join(folder, "tokenizer.model")
    return files.read_bytes(path) if files.exists(path) else b""


def newest_params(recordings: Sequence[Recording], like: Params) -> tuple[Params, Progress]:
    """Return the trained parameters of the newest checkpoint, and the progress of the run then.

    Args:
      recordings: recordings of one policy.
      like: shape structs of the parameters, with shardings.

    Raises:
      UserError: a run has no checkpoint, or the parameters of two runs differ.
    """
    first = recordings[0].folder
    params, record = restore_params(first, like)
    for r in recordings[1:]:
        other, _ = restore_params(r.folder, like)
        same = jax.tree.map(np.array_equal, params, other)
        if not all(jax.tree.leaves(same)):
            raise UserError(
                f"recordings of different policies: the newest parameters of {first} and {r.folder} differ. Compare "
                "schemes on one of them"
            )
    return params, read_progress(record, first)


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
    streams = flatten_trajectories(usable, process_parts=shaping.process_parts)
    _, own = shape_rewards(streams, shaping, gamma=gamma, statistics=RunningMeanStd(), bootstraps=phase.critic)
    if own.n > statistics.n or settings.objective.kl_in_reward != "none":
        unsure = "The running statistics of returns hold this batch's too, which cannot be told apart"
        return statistics, [f"{unsure} (a KL in the reward is not recorded)."]
    return statistics.remove(own), []
