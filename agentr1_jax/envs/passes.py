"""Finite data sets without end: pass after pass, each in an order of its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from agentr1_jax.envs.base import Row

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class FiniteRows:
    """The rows of a task's splits.

    Attributes:
      name: of the task, for messages.
      splits: of which `train` comes in passes, each shuffled anew, and others in their own order, again and again.
      seed: of the order of training rows.

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
        """Row `index` of a split. Raises ValueError where there is no such row; the message lists the splits."""
        if split not in self.splits or index < 0:
            raise ValueError(
                f"{self.name} has no row {split!r} {index}; splits are {list(self.splits)}, rows start at 0"
            )
        rows = self.splits[split]
        return in_passes(rows, index, self.seed) if split == "train" else rows[index % len(rows)]

    def size(self, split: str) -> int:
        """Number of rows of a split."""
        return len(self.splits[split])


def in_passes(rows: Sequence[T], index: int, *key: int) -> T:
    """Row `index` of passes over all rows, each shuffled anew by `key` and its number."""
    visit, nth = divmod(index, len(rows))
    return rows[_shuffled((*key, visit), len(rows))[nth]]


@functools.lru_cache(maxsize=16)
def _shuffled(key: tuple[int, ...], size: int) -> np.ndarray:
    """The order of a pass. int [size]"""
    return np.random.default_rng(key).permutation(size)
