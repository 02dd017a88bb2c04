"""Tasks made of rows: finite data sets in shuffled passes, and rows that are generated."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from agentr1_jax.envs.base import Env, Expert, Row
from agentr1_jax.errors import GET_DATA

T = TypeVar("T")
LAYOUT_SPLITS = ("dev", "eval", "train")
"""Splits of rows that are dealt by their layouts: an eighth, an eighth, and the rest."""
MOST_DRAWS = 10_000


def data_folder(data_dir: str | os.PathLike[str] = "") -> Path:
    """Return the folder of real data: `data_dir`, else AGENTR1_DATA, else `../shared/data` beside the project.

    Raises:
      FileNotFoundError: there is no such folder; the message says how to name one.
    """
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(data_dir or os.environ.get("AGENTR1_DATA") or beside)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such data folder; {GET_DATA}")
    return folder


def check_row(name: str, splits: Collection[str], split: str, index: int) -> None:
    """Raise ValueError, which lists the splits, where task `name` has no such row."""
    if split not in splits or index < 0:
        raise ValueError(f"{name} has no row {split!r} {index}; splits are {', '.join(splits)}, rows start at 0")


@dataclasses.dataclass(frozen=True)
class FiniteRows:
    """Rows of a task's splits, repeated without end.

    Attributes:
      name: name of the task, for messages.
      splits: rows by split; `train` is shuffled anew in each pass, every other split keeps its order.
      seed: seed of the order of training rows.

    Raises:
      ValueError: a split is empty.
    """

    name: str
    splits: Mapping[str, Sequence[Row]]
    seed: int = 0

    def __post_init__(self) -> None:
        for split, rows in self.splits.items():
            if not rows:
                raise ValueError(f"{self.name}: its split {split!r} has no rows")

    def row(self, split: str, index: int) -> Row:
        """Return row `index` of a split. Raises ValueError where there is no such row."""
        check_row(self.name, self.splits, split, index)
        rows = self.splits[split]
        return shuffled_row(rows, index, self.seed) if split == "train" else rows[index % len(rows)]

    def size(self, split: str) -> int:
        """Return the number of rows of a split."""
        return len(self.splits[split])


def shuffled_row(rows: Sequence[T], index: int, *key: int) -> T:
    """Return row `index` of passes over all rows, each pass shuffled anew by `key` and its number."""
    number, place = divmod(index, len(rows))
    return rows[_permutation((*key, number), len(rows))[place]]


@functools.lru_cache(maxsize=16)
def _permutation(key: tuple[int, ...], size: int) -> np.ndarray:
    """Order of one pass. int [size]"""
    return np.random.default_rng(key).permutation(size)


class RowsTask:
    """A Task made of rows and an environment.

    Args:
      name: name of the task.
      splits: rows by split, plain JSON with at least `id`; `train`, and `eval` or others to evaluate on.
      make_env: makes a fresh environment for each episode.
      reward_parts: names of the parts of its rewards.
      expert: (row, seed) -> expert of one episode; without it there is no warm start.
      texts: sample texts, for training a tokenizer; by default the questions and answers of `train`.
      seed: seed of the order of training rows.
      expert_writes_summaries: whether the expert answers `SUMMARY_REQUEST` with a summary.

    Raises:
      ValueError: there is no split `train`, or an empty one, or a row has no id, or its answers are no list.
    """

    def __init__(
        self,
        name: str,
        splits: Mapping[str, Sequence[Row]],
        make_env: Callable[[], Env],
        reward_parts: Sequence[str] = (),
        expert: Callable[[Row, int], Expert] | None = None,
        texts: Sequence[str] = (),
        seed: int = 0,
        expert_writes_summaries: bool = False,
    ) -> None:
        if "train" not in splits:
            raise ValueError(f"{name}: there is no split 'train' among {', '.join(splits) or 'none'}")
        for split, rows in splits.items():
            for number, row in enumerate(rows):
                if not isinstance(row, Mapping) or "id" not in row:
                    raise ValueError(f"{name}: row {number} of {split!r} is no mapping with an 'id': {row!r:.80}")
                if not isinstance(row.get("answers", ()), list | tuple):
                    raise ValueError(f"{name}: 'answers' of row {number} of {split!r} is no list: {row!r:.80}")
        self.name, self.reward_parts, self.env = name, tuple(reward_parts), make_env
        self.expert_writes_summaries, self.has_expert = expert_writes_summaries, expert is not None
        self._expert = expert
        self._texts = texts or [
            text for row in splits["train"] for text in (row.get("question", ""), *row.get("answers", ())) if text
        ]
        rows_of_splits = FiniteRows(name, splits, seed)
        self.row, self.size = rows_of_splits.row, rows_of_splits.size

    def expert(self, row: Row, seed: int) -> Expert:
        """Return an expert for one episode. Raises ValueError where the task has none."""
        if self._expert is None:
            raise ValueError(f"{self.name} has no expert to learn from; set warm_start.updates=0, or give it one")
        return self._expert(row, seed)

    def texts(self, count: int) -> Sequence[str]:
        """Return the first texts."""
        return self._texts[:count]


@dataclasses.dataclass(frozen=True)
class ProceduralTask:
    """A Task whose rows are generated from their split and index, without end.

    Attributes:
      name: name of the task.
      splits: names of its splits.
      make_row: (split, index) -> row.
      make_env: makes a fresh environment for each episode.
      reward_parts: names of the parts of its rewards.
      make_expert: (row, seed) -> expert of one episode; equal seeds give equal decisions.
      make_texts: generates sample texts of training rows, without end.
      expert_writes_summaries: whether experts answer `SUMMARY_REQUEST` with a summary.

    Raises:
      ValueError: the settings of the task leave no row of a split.
    """

    name: str
    splits: Sequence[str]
    make_row: Callable[[str, int], Row]
    make_env: Callable[[], Env]
    reward_parts: Sequence[str]
    make_expert: Callable[[Row, int], Expert]
    make_texts: Callable[[], Iterator[str]]
    expert_writes_summaries: bool = False

    def __post_init__(self) -> None:
        for split in self.splits:
            self.row(split, 0)

    def row(self, split: str, index: int) -> Row:
        """Return row `index` of a split. Raises ValueError where there is no such row."""
        check_row(self.name, self.splits, split, index)
        return self.make_row(split, index)

    def size(self, split: str) -> int | None:
        """Return None: rows do not run out."""
        return None

    def env(self) -> Env:
        """Return a fresh environment."""
        return self.make_env()

    def expert(self, row: Row, seed: int) -> Expert:
        """Return an expert for one episode."""
        return self.make_expert(row, seed)

    def texts(self, count: int) -> Sequence[str]:
        """Return the first texts."""
        return list(itertools.islice(self.make_texts(), count))


def draw_row(
    name: str,
    split: str,
    index: int,
    *,
    draw: Callable[[random.Random], Row | None],
    layout: Callable[[Row], str],
    remedy: str = "change them",
) -> Row:
    """Return row `index` of one of `LAYOUT_SPLITS`: the first draw whose layout belongs to that split, and its id.

    Args:
      name: name of the task.
      split: name of the split.
      index: number of the row in its split.
      draw: makes a random row without id; None where the draw is to be made again.
      layout: row -> text that decides its split.
      remedy: settings to change where no draw serves, for the message.

    Raises:
      ValueError: no draw serves.
    """
    rng = random.Random(f"{name}/{split}/{index}")
    for _ in range(MOST_DRAWS):
        row = draw(rng)
        if row is not None and _split_of(layout(row)) == split:
            return {"id": f"{name}/{split}/{index}", **row}
    raise ValueError(f"{name}: its settings leave too few layouts: of {MOST_DRAWS}, none is of {split!r}; {remedy}")


def _split_of(layout: str) -> str:
    eighth = zlib.crc32(layout.encode()) % 8
    return ("eval", "dev")[eighth] if eighth < 2 else "train"
