"""Arms of an ablation: named changes to a config, from the command line or from a file."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentr1_jax.errors import UserError
from agentr1_jax.registry import split_list
from agentr1_jax.runtime import config as configs
from experiments.setup import Config, change_config

GIVEN_BY_GRID = ("seed", "run_dir", "compilation_cache")
"""Keys that the grid sets, so that a whole config may have any value of them."""
SYNTAX = "write KEY=VALUE,VALUE, where +KEY=VALUE after a value changes one more key, or name a file FILE.py"
FILE_SYNTAX = (
    "get_arms(config) must yield pairs of a label and {'key': value}, or of a label and a config, or configs alone"
)


@dataclasses.dataclass(frozen=True)
class Arm:
    """Changes to the config that all runs share.

    Attributes:
      name: of the arm, for tables and folders.
      changes: dotted key -> value, as text or as it is.
    """

    name: str
    changes: Mapping[str, Any]


def parse_arms(texts: Sequence[str], config: Config) -> list[Arm]:
    """Return the product of several lists of arms.

    Args:
      texts: of each list. `KEY=VALUE,VALUE` has an arm for each value, as the command line writes it, and
        `+KEY=VALUE` after it changes one more key in that arm; `credit=NAME(ARGUMENT=VALUE)` chooses a credit scheme.
        Commas in brackets belong to a value. `FILE.py` has those that its `get_arms(config)` yields.
      config: the config without any arm.

    Raises:
      UserError: a list is none or is empty, two arms are one, or an arm sets a key twice.
    """
    arms = [Arm("", {})]
    for text in texts:
        arms = [_join(one, other) for one, other in itertools.product(arms, _parse_list(text, config))]
    for one, other in itertools.combinations(arms, 2):
        if folder_name(one.name) == folder_name(other.name):
            raise UserError(f"arms {one.name!r} and {other.name!r} are one arm; leave one of them out")
    return arms


def folder_name(arm: str) -> str:
    """Return the name of an arm as that of a folder."""
    return re.sub(r"[^\w.=+-]+", "_", arm).strip("_")


def _join(one: Arm, other: Arm) -> Arm:
    """Return an arm with the changes of both."""
    if twice := one.changes.keys() & other.changes.keys():
        raise UserError(f"arms {one.name!r} and {other.name!r} both set {min(twice)}; set it in one --arms")
    return Arm("+".join(filter(None, (one.name, other.name))), {**one.changes, **other.changes})


def _parse_list(text: str, config: Config) -> list[Arm]:
    key, equals, values = text.partition("=")
    key = key.strip()
    if not equals and text.strip().endswith(".py"):
        return _read_file(text.strip(), config)
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
        raise UserError(f"--arms={text}: {SYNTAX}")
    items = [item.strip() for item in split_list(values) if item.strip()]
    if not items:
        raise UserError(f"--arms={text} has no values; {SYNTAX}")
    return [_parse_item(key, item, config) for item in items]


def _parse_item(key: str, item: str, config: Config) -> Arm:
    """Parse a value with what is changed beside it: `step_gae(lam=.9)+loss.clip=dual`."""
    first, *rest = re.split(r"\+(?=[A-Za-z_][\w.]*=)", item)
    pairs = [(key, first), *((name, value) for name, _, value in (part.partition("=") for part in rest))]
    name = re.sub(r"\s+", "", item if key in ("credit", "credit.name") else f"{key}={item}")
    changes = {part: value.strip() for part, value in pairs}
    if not all(changes.values()):
        raise UserError(f"arm {name!r} has a key without a value; {SYNTAX}")
    if len(changes) < len(pairs):
        raise UserError(f"arm {name!r} sets something twice")
    return Arm(name, configs.expand_calls(config, changes, f"arm {name!r}"))


def _read_file(path: str, config: Config) -> list[Arm]:
    """Return the arms that a user's file yields."""
    given = change_config(config, {})  # For the file to change.

    def call(module: Any) -> list[Any]:
        if not hasattr(module, "get_arms"):
            raise UserError(f"{path} has no function get_arms(config); {FILE_SYNTAX}")
        found = module.get_arms(given)
        if not isinstance(found, Iterable):
            raise UserError(f"{path}: get_arms returned a {type(found).__name__}; {FILE_SYNTAX}")
        return list(found)

    arms = [_make_arm(item, config, path) for item in configs.execute_file(path, call)]
    if not arms:
        raise UserError(f"{path}: get_arms yields no arm; {FILE_SYNTAX}")
    return arms


def _make_arm(item: Any, config: Config, path: str) -> Arm:
    label, changes = item if isinstance(item, tuple) and len(item) == 2 else ("", item)
    if isinstance(changes, Config):
        before = dict(configs.flatten(config.to_dict()))
        after = dict(configs.flatten(changes.to_dict()))
        missing = object()
        changes = {k: x for k, x in after.items() if x != before.get(k, missing) and k not in GIVEN_BY_GRID}
    elif not (label and isinstance(changes, Mapping)):
        raise UserError(f"{path} yields {item!r}; {FILE_SYNTAX}")
    flat = {key: tuple(x) if isinstance(x, list) else x for key, x in configs.flatten(changes)}
    name = str(label) or "+".join(f"{key}={value}" for key, value in flat.items()) or "config"
    return Arm(name, configs.expand_calls(config, flat, f"arm {name!r}"))
