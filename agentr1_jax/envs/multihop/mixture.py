"""In which order training draws from several data sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from agentr1_jax.envs.multihop.rows import known


def shares_of(mixture: Sequence[str], sizes: Mapping[str, int]) -> dict[str, float]:
    """The share of each data set among the draws.

    Args:
      mixture: weights as `name=weight`, one for each data set; empty for weights by size.
      sizes: training rows of each data set, at least 1.

    Returns:
      shares that sum to 1, in the order of `sizes`; data sets of weight 0 are left out.

    Raises:
      ValueError: a weight cannot be read, is negative, names no data set or is missing; or all are 0.
    """
    weights = {name: float(size) for name, size in sizes.items()}
    if mixture:
        given: dict[str, float] = {}
        for entry in mixture:
            name, weight = _parsed(entry)
            if known(name, sizes, "data set of task.mixture") in given:
                raise ValueError(f"task.mixture names {name!r} twice")
            given[name] = weight
        for name in sizes:
            if name not in given:
                raise ValueError(f"task.mixture has no weight of {name!r}; give one, 0 to leave the data set out")
        weights = {name: given[name] for name in sizes}
    total = sum(weights.values())
    if not total > 0:
        raise ValueError(f"the weights of task.mixture {tuple(mixture)} are all 0; make one positive")
    return {name: weight / total for name, weight in weights.items() if weight}


def draw(shares: Sequence[float], offsets: Sequence[float], index: int) -> tuple[int, int]:
    """Which data set the draw `index` is from, and how many draws it had before.

    The j-th row of data set k is due at the time (j + oₖ) / pₖ, and draws go by these times. So among any n draws in a
    row, data set k has n pₖ to within the number of data sets, and after N draws exactly nₖ where pₖ = nₖ / N.

    Args:
      shares: pₖ > 0, sum 1.
      offsets: oₖ within 0 and 1.
      index: of the draw, at least 0.

    Returns:
      (k, j)
    """
    # Σₖ of what was due by a time is that time to within the number of data sets, so few steps are left to go.
    start = max(index - len(shares) - 1, 0)
    counts = [max(math.floor(share * start - offset), 0) for share, offset in zip(shares, offsets, strict=True)]
    while True:
        times = [(n + offset) / share for n, offset, share in zip(counts, offsets, shares, strict=True)]
        k = int(np.argmin(times))
        if sum(counts) == index:
            return k, counts[k]
        counts[k] += 1


def _parsed(entry: str) -> tuple[str, float]:
    name, _, text = str(entry).partition("=")
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ValueError(f"task.mixture: {entry!r} is not 'name=weight' with a weight of 0 or more, e.g. 'hotpotqa=2'")
    return name.strip(), weight
