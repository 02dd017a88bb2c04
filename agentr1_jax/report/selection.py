"""Recorded trajectories that a report shows: which ones, and reading them one at a time.

A file is read line by line. Choosing parses uids alone, and whole records, without arrays, only where rewards decide.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from agentr1_jax.errors import UserError
from agentr1_jax.runtime.run_folder import RunFolder, batch_name
from agentr1_jax.trajectory import Trajectory
from agentr1_jax.trajectory_io import read_jsonl, read_rewards, read_uids

MOST_EVALUATIONS = 4
NEAR = 8
"""RL batches in which a group is looked for: those that begin nearest before and after it."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Selection:
    """What a report shows of a run.

    Attributes:
      updates: RL batches, by update counted from 0; -1 for the newest one. Empty for a sample of everything: the newest
        RL batch, the first one, evaluations, demonstrations.
      worst: number of trajectories of lowest reward to show of those batches (of the newest if `updates` is empty).
      group: prompt index of one group of an RL batch, as in the uid `rl/000624/3`.
      most: trajectories to show of the newest batch in a sample of everything; less of the rest.
    """

    updates: Sequence[int] = ()
    worst: int | None = None
    group: int | None = None
    most: int = 64


@dataclasses.dataclass(frozen=True)
class Source:
    """Trajectories of one file.

    Attributes:
      name: of the file's kind: `rl_000017`, `eval_after`, `demonstrations`.
      path: of the file.
      shown: uids of those to show; None for all.
      mates: names of groups (`group_name`) whose other members are listed, but not shown.
    """

    name: str
    path: str
    shown: Collection[str] | None = None
    mates: Collection[str] = ()

    def is_shown(self, uid: str) -> bool:
        """Return True for a trajectory to show."""
        return self.shown is None or uid in self.shown

    def read(self, notes: list[str]) -> Iterator[Trajectory]:
        """Read the trajectories to show and those to list, one at a time; see `tolerate`."""

        def is_listed(uid: str) -> bool:
            return self.is_shown(uid) or group_name(uid) in self.mates

        return tolerate(read_jsonl(self.path, is_listed), notes)


def group_name(uid: str) -> str:
    """Return what the uids of a group share: `rl/000624` of `rl/000624/3`."""
    return uid.rpartition("/")[0]


def prompt_index(uid: str) -> int:
    """Return 624 of `rl/000624/3`; -1 for a uid of another form."""
    parts = uid.split("/")
    return int(parts[1]) if len(parts) > 2 and parts[1].isdecimal() else -1


def tolerate(read: Iterable[T], notes: list[str]) -> Iterator[T]:
    """Yield what can be read of a file; a file that is damaged, or gone since it was listed, adds a note and ends.

    Another process may write the run meanwhile; its files appear whole.
    """
    try:
        yield from read
    except (ValueError, OSError) as error:
        note = str(error)
        if note not in notes:
            notes.append(note)


def choose(folder: RunFolder, selection: Selection, notes: list[str]) -> list[Source]:
    """Choose the trajectories of a report: the newest RL batch, then the others from the newest to the oldest.

    Args:
      folder: of a run, which may be running.
      selection: what to show.
      notes: gets a sentence for each file that cannot be read.

    Raises:
      UserError: the run has no such RL batch or group.
    """
    chosen = selection.updates or selection.worst is not None or selection.group is not None
    return _explicit(folder, selection, notes) if chosen else _sample(folder, selection.most, notes)


def _sample(folder: RunFolder, most: int, notes: list[str]) -> list[Source]:
    """Choose whole groups of the newest and the first RL batch, and some of evaluations and demonstrations."""
    by_name = sorted(folder.trajectory_files().items(), key=lambda item: _time(item[0]), reverse=True)
    batches = [name for name, _ in by_name if name.startswith("rl_")]
    evaluations = [name for name, _ in by_name if name.startswith("eval_")]
    first = [name for name in evaluations if name.startswith("eval_before")]
    counts = dict.fromkeys([*evaluations[:MOST_EVALUATIONS], *first], most // 4)
    counts |= {"demonstrations": most // 8}
    counts |= {**dict.fromkeys(batches[-1:], most // 4), **dict.fromkeys(batches[:1], most)}
    sources = []
    # The newest batch comes first: its advantages have accounts.
    for name, paths in sorted(by_name, key=lambda item: item[0] not in batches[:1]):
        left = counts.get(name, 0)
        for path in paths:
            if left > 0:
                whole = _whole_groups if name in batches else _first
                shown = whole(tolerate(read_uids(path), notes), left)
                sources.append(Source(name, path, frozenset(shown)))
                left -= len(shown)
    return sources


def _time(name: str) -> tuple[int, int, str]:
    """Return when a file of this name is written, as a key to sort by."""
    number = re.search(r"_(\d+)$", name)
    if number:  # An evaluation comes before the batch of the same number.
        return 2, int(number[1]), name
    return {"demonstrations": 0, "eval_after": 3, "eval_after_sampled": 3}.get(name, 1), 0, name


def _first(uids: Iterable[str], most: int) -> list[str]:
    return list(itertools.islice(uids, most))


def _whole_groups(uids: Iterable[str], most: int) -> list[str]:
    """Return the members of the first groups, at least one, that have `most` members together."""
    groups: dict[str, list[str]] = {}
    for uid in uids:  # Members of a group need not be neighbours: those without a reward come last.
        groups.setdefault(group_name(uid), []).append(uid)
    out: list[str] = []
    for members in groups.values():
        if out and len(out) + len(members) > most:
            break
        out += members
    return out


def _explicit(folder: RunFolder, selection: Selection, notes: list[str]) -> list[Source]:
    """Choose what `updates`, `worst` and `group` name."""
    recorded = folder.batch_files()
    newest = max(recorded)
    updates = list(folder.recorded_batches(selection.updates))
    if selection.group is None:
        sources = [Source(batch_name(u), path) for u in updates or [newest] for path in recorded[u]]
    else:
        sources = _members(recorded, updates or _near(recorded, selection.group, notes), selection.group, notes)
        if not sources:
            of_newest = [prompt_index(uid) for path in recorded[newest] for uid in tolerate(read_uids(path), notes)]
            known = f"; the newest batch has {min(of_newest)} to {max(of_newest)}" if of_newest else ""
            where = f"the RL batches {updates}" if updates else "the recorded RL batches"
            raise UserError(f"{folder.path}: group {selection.group} is not in {where}{known}")
    return sources if selection.worst is None else _worst(sources, selection.worst, notes)


def _near(recorded: Mapping[int, Sequence[str]], group: int, notes: list[str]) -> list[int]:
    """Return the updates whose batches may have a group, the likeliest first; prompts are used in their order."""
    updates = sorted(recorded)

    def first_prompt(place: int) -> int:
        for update in updates[place::-1]:  # Before a damaged batch the one before it counts.
            for uid in tolerate(read_uids(recorded[update][0]), notes):
                return prompt_index(uid)
        return -1

    place = max(bisect.bisect_right(range(len(updates)), group, key=first_prompt) - 1, 0)
    return sorted(updates, key=lambda update: abs(update - updates[place]))[:NEAR]


def _members(
    recorded: Mapping[int, Sequence[str]], updates: Sequence[int], group: int, notes: list[str]
) -> list[Source]:
    """Return the members of a group, which one process has sampled and written to one file; empty if there is none."""
    for update in updates:
        for path in recorded[update]:
            members = [uid for uid in tolerate(read_uids(path), notes) if prompt_index(uid) == group]
            if members:
                return [Source(batch_name(update), path, frozenset(members))]
    return []


def _worst(sources: Sequence[Source], count: int, notes: list[str]) -> list[Source]:
    """Return the trajectories of lowest reward among some; a trajectory without a reward is none of them."""
    rewards = (
        (reward, place, uid)
        for place, source in enumerate(sources)
        for uid, reward in tolerate(read_rewards(source.path), notes)
        if reward is not None and source.is_shown(uid)
    )
    by_source: dict[int, list[str]] = {}
    for _, place, uid in heapq.nsmallest(count, rewards):
        by_source.setdefault(place, []).append(uid)
    return [
        dataclasses.replace(sources[place], shown=frozenset(uids), mates=frozenset(map(group_name, uids)))
        for place, uids in sorted(by_source.items())
    ]
