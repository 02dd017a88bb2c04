"""The grid of an ablation: the config of each run, and what it starts from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentr1_jax import files
from agentr1_jax.credit import get_scheme
from agentr1_jax.credit.scheme import SCHEMES, CreditConfig
from agentr1_jax.errors import UserError, user_error
from agentr1_jax.learner.config import LearnerConfig
from agentr1_jax.runtime import config as configs
from agentr1_jax.train.settings import RunConfig, Settings, WarmStartConfig, load_file
from agentr1_jax.trajectory import Budget
from experiments.ablation.arms import Arm, folder_name
from experiments.setup import COMPUTED_OTHERWISE, Config, adapt, change_config, read_section, read_settings

WARM_START = "warm_start"
SAME_FOR_ALL = ("seed", "run_dir", "compilation_cache", "warm_start.control_seconds", "eval")
"""Keys and sections that an arm cannot change: where its runs lie, and how they are measured."""
START_KEYS = (
    *("policy", "tokenizer", "pretrain", "warm_start", "task"),
    *("context.rule", "context.file", "context.summary_tokens", "agent"),
)
"""Keys and sections that make another warm start: the policy, what it learns from, and how prompts look. A policy must
imitate demonstrations like the prompts that it meets in RL, so an arm that changes one of these has a warm start of its
own."""


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One run of the grid.

    Attributes:
      arm: name of the arm; for a warm start `warm_start` with its changes.
      seed: seed of the run.
      folder: folder of the run; log and config file lie beside it.
      config: config of the run.
      after: folder of the run that must finish first; "" for none.
      note: remark on the arm for the table.
    """

    arm: str
    seed: int
    folder: str
    config: Config
    after: str = ""
    note: str = ""

    @property
    def title(self) -> str:
        """Arm and seed as text."""
        return f"{self.arm} seed {self.seed}"

    @functools.cached_property
    def settings(self) -> Settings:
        """Settings of the run. Raises UserError where they do not fit each other."""
        return read_settings(self.config)

    @property
    def is_finished(self) -> bool:
        """True if the run has finished."""
        return is_finished(self.folder)


def is_finished(folder: str) -> bool:
    """Return True if a folder holds a finished run."""
    return os.path.exists(os.path.join(folder, "summary.json"))


def parse_seeds(texts: Sequence[str]) -> list[int]:
    """Parse seeds. Raise UserError if one is not a number."""
    if not all(text.isdecimal() for text in texts):
        raise UserError(f"--seeds={','.join(texts)}: write whole numbers, e.g. --seeds=0,1,2")
    return [int(text) for text in texts]


def parse_share(text: str) -> slice:
    """Parse `K/N`, part K of N, as a slice of a list of runs. Raises UserError if it is not one."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise UserError(f"--share={text}: write K/N with K from 0 to N - 1, e.g. 0/4 on the first of four machines")
    return slice(int(number), None, int(count))


def make_grid(config: Config, arms: Sequence[Arm], seeds: Sequence[int], out: str) -> tuple[list[Cell], list[Cell]]:
    """Make the runs of a grid, seed by seed.

    Args:
      config: config that all runs share.
      arms: arms of the grid.
      seeds: seeds of each arm.
      out: folder of the grid.

    Returns:
      the warm starts, one for each seed and `START_KEYS` of the arms; the runs of the arms. There is none for an arm
      without a warm start, or with a run to start from.

    Raises:
      UserError: an unknown scheme or key, a value of another type or that is refused, a key that no arm may change.
    """
    if read_section(config, WarmStartConfig).control_seconds:
        raise UserError("warm_start.control_seconds is set: control runs have no reinforcement learning to compare")
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise UserError(f"--seeds={','.join(map(str, seeds))}: name different seeds, e.g. --seeds=0,1,2")
    if file := read_section(config, CreditConfig).file:
        load_file(SCHEMES, file)
    for arm in arms:
        with _name_arm(arm):
            read_settings(configure(config, arm)[0])
    warm_starts, cells = dict[str, Cell](), list[Cell]()
    for seed, arm in itertools.product(seeds, arms):
        folder = os.path.join(out, folder_name(arm.name), f"seed{seed}")
        own, note = configure(change_config(config, {"seed": seed, "run_dir": folder}), arm)
        after, begins = "", read_section(own, WarmStartConfig)
        if begins.updates and not begins.init_from:
            start = _warm_start(config, own, arm, seed, out)
            warm_starts.setdefault(start.folder, start)
            own, after = change_config(own, {"warm_start.init_from": start.folder}), start.folder
        cells.append(Cell(arm.name, seed, folder, own, after, note))
    return list(warm_starts.values()), cells


def configure(config: Config, arm: Arm) -> tuple[Config, str]:
    """Return the config of an arm, and a remark on it for the table.

    Arguments of the config's own credit scheme stay where the arm's scheme has them, too (`adapt`). A scheme that needs
    a critic gets one, and an arm without a mask gets room for the tokens of observations.
    """
    where, notes = f"arm {arm.name!r}", list[str]()
    if fixed := [key for key in arm.changes if _is_in(key, SAME_FOR_ALL)]:
        raise UserError(f"{where} changes {fixed[0]}, which is the same for all arms; change it by --config.{fixed[0]}")
    with _name_arm(arm):
        adapted, _ = adapt(config, arm.changes)
        scheme = get_scheme(str(arm.changes.get("credit.name", config.credit.name)))
    config = configs.override(adapted, arm.changes, where)
    with _name_arm(arm):
        if scheme.needs_critic and read_section(config, RunConfig).critic == "none":
            config = change_config(config, {"critic": "shared_trunk"})
            notes.append("with critic=shared_trunk, since the config has none")
        probes = read_section(config, CreditConfig).probe
        if scheme.needs_belief and probes == "none":
            probes = "reference" if read_section(config, CreditConfig).bind().needs_frozen_belief else "policy"
            config = change_config(config, {"credit.probe": probes})
            notes.append(f"with credit.probe={probes}, since the config has none")
        learner, context_tokens = read_section(config, LearnerConfig), read_section(config, Budget).context_tokens
        if learner.observations and learner.row_loss_tokens < context_tokens:
            config = change_config(config, {"learner.row_loss_tokens": context_tokens})
            room = "with learner.row_loss_tokens=budget.context_tokens"
            notes.append(f"{room}, since observation tokens are loss tokens too")
    if any(_is_in(key, ("task",)) and ".rewards." not in key for key in arm.changes):
        notes.append("with other keys of the task: its questions may differ")
    return config, "; ".join(notes)


def write_config(cell: Cell) -> str:
    """Write a run's config beside its folder, for `configs/resolved.py`; returns the path."""
    path = f"{cell.folder}.json"
    with files.atomic_write(path) as out:
        json.dump(configs.resolve(cell.config, credentials=True), out, indent=2)
    return path


def summary(cell: Cell) -> Mapping[str, float]:
    """Read the summary of a finished run."""
    with open(os.path.join(cell.folder, "summary.json"), encoding="utf-8") as lines:
        return json.load(lines)


def _warm_start(config: Config, own: Config, arm: Arm, seed: int, out: str) -> Cell:
    """Return the warm start of an arm's run: that of the config, with what of the arm's config it depends on."""
    before, after = (dict(configs.flatten(c.to_dict())) for c in (config, own))
    changes: dict[str, Any] = {
        key: after[key]
        for key in sorted(arm.changes.keys() & after.keys())  # Their order is in the folder's name.
        if _is_in(key, START_KEYS)
        and ".rewards." not in key
        and key not in COMPUTED_OTHERWISE
        and after[key] != before.get(key)
    }
    name = "+".join([WARM_START, *(f"{key}={value}" for key, value in changes.items())])
    folder = os.path.join(out, folder_name(name), f"seed{seed}")
    # What warm starts have no use for is what the config of an ablation may leave out.
    unused = {"updates": 0, "critic": "none", "credit.name": "reinforce", "optimizer.critic_warmup": 0}
    start = configs.override(adapt(config, {**unused, **changes})[0], changes, f"arm {arm.name!r}")
    return Cell(name, seed, folder, change_config(start, {**unused, "seed": seed, "run_dir": folder}))


def _is_in(key: str, sections: Sequence[str]) -> bool:
    """Return True for one of these keys, or a key of one of these sections."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


@contextlib.contextmanager
def _name_arm(arm: Arm) -> Iterator[None]:
    """Put the name of an arm before the message of an error."""
    prefix = f"arm {arm.name!r}: "
    try:
        with user_error():
            yield
    except UserError as error:
        message = str(error)
        raise UserError(message if message.startswith(prefix[:-2]) else f"{prefix}{message}") from error
