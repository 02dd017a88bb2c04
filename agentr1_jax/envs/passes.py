"""Finite data sets without end: pass after pass, each in an order of its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def in_passes(rows: Sequence[T], index: int, *key: int) -> T:
    """Row `index` of passes over all rows, each shuffled anew by `key` and its number."""
    visit, nth = divmod(index, len(rows))
    return rows[_shuffled((*key, visit), len(rows))[nth]]


@functools.lru_cache(maxsize=16)
def _shuffled(key: tuple[int, ...], size: int) -> np.ndarray:
    """The order of a pass. int [size]"""
    return np.random.default_rng(key).permutation(size)
