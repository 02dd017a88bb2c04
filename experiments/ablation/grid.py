"""The grid of an ablation: arms parsed from text, and the config of each run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentr1_jax.credit import get_scheme
from agentr1_jax.credit.scheme import SCHEMES, CreditConfig
from agentr1_jax.errors import UserError
from agentr1_jax.learner.config import LearnerConfig
from agentr1_jax.registry import Value, parse_call, split_list
from agentr1_jax.runtime import config as configs
from agentr1_jax.train.settings import RunConfig, Settings, WarmStartConfig, load_file
from agentr1_jax.trajectory import Budget
from experiments.setup import Config, adapt, change_config, differing_policy_keys, read_section, read_settings

WARM_START = "warm_start"
SAME_FOR_ALL = ("seed", "run_dir", "compilation_cache", "warm_start.control_seconds", "eval", "task")
"""Keys that an arm cannot change, except for reward weights: its runs would not compare with those of other arms."""
WARM_START_SECTIONS = ("pretrain", "warm_start")
PROMPT_KEYS = ("context.rule", "context.file", "context.summary_tokens", "agent.call_format", "agent.tell_tools")
"""Keys of how prompts look. A policy must imitate demonstrations like the prompts that it meets in RL, so an arm that
changes one of these has a warm start of its own."""
SYNTAX = "write SCHEME, SCHEME(setting=value, ...), or either with changes: SCHEME+config.key=value+config.key=value"


@dataclasses.dataclass(frozen=True)
class Arm:
    """A credit scheme and changes to the config, as text.

    Attributes:
      name: its text.
      scheme: name of the credit scheme.
      settings: arguments of the scheme.
      changes: other key of the config -> value, as text.
    """

    name: str
    scheme: str
    settings: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    changes: Mapping[str, str] = dataclasses.field(default_factory=dict)


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


def parse_arms(text: str) -> list[Arm]:
    """Parse a list of arms such as `grpo,gigpo(norm=mean_std_norm),grpo+loss.clip=dual`.

    Raises:
      UserError: the list is empty, an item is not an arm, or an arm comes twice.
    """
    arms = [_parse_arm(item) for item in split_list(text) if item.strip()]
    if not arms:
        raise UserError(f"--schemes is empty; {SYNTAX}")
    for one, other in itertools.combinations(arms, 2):
        if folder_name(one.name) == folder_name(other.name):
            raise UserError(f"--schemes: {one.name!r} and {other.name!r} are one arm; leave one of them out")
    return arms


def cross(arms: Sequence[Arm], key: str, values: Sequence[str], present: Any) -> list[Arm]:
    """Combine each arm with each value of a key; the name of an arm has the value where it differs from the config.

    Raises:
      UserError: a value is neither true nor false, comes twice, or an arm sets the key by itself.
    """
    if not set(values) <= {"true", "false"} or len(set(values)) < len(values):
        raise UserError(f"--{key.rpartition('.')[2]}={','.join(values)}: write true, false, or both")
    out = []
    for arm, value in itertools.product(arms, values):
        if key in arm.changes:
            raise UserError(f"--schemes: {arm.name!r} sets {key}, and so does --{key.rpartition('.')[2]}")
        name = arm.name if value == str(present).lower() else f"{arm.name}+{key}={value}"
        out.append(dataclasses.replace(arm, name=name, changes={**arm.changes, key: value}))
    return out


def parse_seeds(texts: Sequence[str]) -> list[int]:
    """Parse seeds. Raise UserError if one is not a number."""
    if not all(text.isdecimal() for text in texts):
        raise UserError(f"--seeds={','.join(texts)}: write whole numbers, e.g. --seeds=0,1,2")
    return [int(text) for text in texts]


def parse_share(text: str) -> slice:
    """Parse `K/N`, the share of machine K of N, as a slice of a list of runs. Raises UserError if it is not one."""
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
      the warm starts, one for each seed and context rule, and the runs of the arms. There are no warm starts where the
      config has none, or names the run to start from.

    Raises:
      UserError: an unknown scheme or key, a value of another type, a key that no arm may change.
    """
    warm_start = read_section(config, WarmStartConfig)
    if warm_start.control_seconds:
        raise UserError("warm_start.control_seconds is set: control runs have no credit assignment to compare")
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise UserError(f"--seeds={','.join(map(str, seeds))}: name different seeds, e.g. --seeds=0,1,2")
    shared = bool(warm_start.updates) and not warm_start.init_from
    if file := read_section(config, CreditConfig).file:
        load_file(SCHEMES, file)
    warm_starts, cells = dict[str, Cell](), list[Cell]()
    for seed, arm in itertools.product(seeds, arms):
        folder = os.path.join(out, folder_name(arm.name), f"seed{seed}")
        own, note = configure(change_config(config, {"seed": seed, "run_dir": folder}), arm)
        after = ""
        if shared:
            start = _warm_start(config, arm, seed, out)
            _check_same_start(arm, own, start.config)
            warm_starts.setdefault(start.folder, start)
            own, after = change_config(own, {"warm_start.init_from": start.folder}), start.folder
        cells.append(Cell(arm.name, seed, folder, own, after, note))
    return list(warm_starts.values()), cells


def configure(config: Config, arm: Arm) -> tuple[Config, str]:
    """Return the config of an arm, and a remark on it for the table.

    Arguments of the config's own scheme stay where the arm's scheme has them, too (`adapt`). A scheme that needs a
    critic gets one, and an arm without a mask gets room for the tokens of observations.
    """
    where = f"--schemes: {arm.name!r}"
    try:
        scheme = get_scheme(arm.scheme)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    changes = {
        "credit.name": arm.scheme,
        **{f"credit.args.{key}": value for key, value in arm.settings.items()},
        **arm.changes,
    }
    for key in changes:
        fixed = key in SAME_FOR_ALL or key.startswith(tuple(f"{same}." for same in SAME_FOR_ALL))
        if fixed and ".rewards." not in key:
            raise UserError(f"{where} changes {key}, which is the same for all arms; change it by --config.{key}")
    config, notes = configs.override(adapt(config, changes)[0], changes, where), list[str]()
    if scheme.needs_critic and read_section(config, RunConfig).critic == "none":
        config = change_config(config, {"critic": "shared_trunk"})
        notes.append("with critic=shared_trunk, since the config has none")
    probes = read_section(config, CreditConfig).probe
    if scheme.needs_belief and probes == "none":
        probes = "reference" if scheme.bind(**arm.settings).needs_frozen_belief else "policy"
        config = change_config(config, {"credit.probe": probes})
        notes.append(f"with credit.probe={probes}, since the config has none")
    learner, context_tokens = read_section(config, LearnerConfig), read_section(config, Budget).context_tokens
    if learner.observations and learner.row_loss_tokens < context_tokens:
        config = change_config(config, {"learner.row_loss_tokens": context_tokens})
        notes.append("with learner.row_loss_tokens=budget.context_tokens, since observation tokens are loss tokens too")
    return config, "; ".join(notes)


def folder_name(arm: str) -> str:
    """Return the name of an arm as that of a folder."""
    return re.sub(r"[^\w.=+-]+", "_", arm).strip("_")


def write_config(cell: Cell) -> str:
    """Write a run's config beside its folder, for `configs/resolved.py`; returns the path."""
    path = f"{cell.folder}.json"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.partial", "w", encoding="utf-8") as out:
        json.dump(configs.resolve(cell.config), out, indent=2)
    os.replace(f"{path}.partial", path)
    return path


def summary(cell: Cell) -> Mapping[str, float]:
    """Read the summary of a finished run."""
    with open(os.path.join(cell.folder, "summary.json"), encoding="utf-8") as lines:
        return json.load(lines)


def _warm_start(config: Config, arm: Arm, seed: int, out: str) -> Cell:
    """Return the warm start of an arm's run: that of the config, with the prompts of the arm."""
    present = dict(configs.flatten(configs.resolve(config)))
    changes = {
        key: arm.changes[key] for key in PROMPT_KEYS if arm.changes.get(key, str(present[key])) != str(present[key])
    }
    name = "+".join([WARM_START, *(f"{key}={value}" for key, value in changes.items())])
    folder = os.path.join(out, folder_name(name), f"seed{seed}")
    # What warm starts have no use for is what the config of an ablation may leave out.
    unused = {"updates": 0, "critic": "none", "credit.name": "reinforce", "optimizer.critic_warmup": 0}
    start = configs.override(adapt(config, unused)[0], changes, f"--schemes: {arm.name!r}")
    return Cell(name, seed, folder, change_config(start, {**unused, "seed": seed, "run_dir": folder}))


def _check_same_start(arm: Arm, own: Config, start: Config) -> None:
    """Refuse an arm whose runs cannot start from the warm start that all share."""
    different = differing_policy_keys(own, configs.resolve(start))
    useless = [key for key in arm.changes if key.partition(".")[0] in WARM_START_SECTIONS]
    if different or useless:
        listed = "\n".join([*different, *(f"  {key}" for key in useless)])
        raise UserError(
            f"--schemes: {arm.name!r} would need a warm start of its own:\n{listed}\n"
            "all arms share one; change it for all by --config.*, or make runs of that arm by themselves"
        )


def _parse_arm(item: str) -> Arm:
    scheme, *changes = re.split(r"\+(?=[A-Za-z_][\w.]*=)", item.strip())
    try:
        call = parse_call(scheme, "--schemes")
    except ValueError as error:
        raise UserError(f"--schemes: {item.strip()!r} is not an arm; {SYNTAX}") from error
    pairs = [change.partition("=") for change in changes]
    named = {key: value.strip() for key, _, value in pairs}
    if call.values or not all(named.values()):
        raise UserError(f"--schemes: {item.strip()!r} has a setting without a value; {SYNTAX}")
    if len(named) < len(pairs):
        raise UserError(f"--schemes: {item.strip()!r} sets something twice")
    return Arm(re.sub(r"\s+", "", item), call.name, call.named, named)
