"""In which order training draws from several sources, by their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from agentr1_jax.registry import parse_call


def parse_weights(entries: Sequence[str], key: str) -> dict[str, float]:
    """Weights of a mixture, written as `name(weight=2)`.

    Args:
      entries: one for each source.
      key: of the config, for messages.

    Raises:
      ValueError: a weight cannot be read or is negative, or a name comes twice.
    """
    weights: dict[str, float] = {}
    for entry in entries:
        call = parse_call(str(entry), key)
        weight = call.named.get("weight")
        if not isinstance(weight, int | float) or call.values or len(call.named) > 1 or not 0 <= weight < math.inf:
            raise ValueError(f"{key}: {entry!r}: write name(weight=2), with a weight of 0 or more")
        if call.name in weights:
            raise ValueError(f"{key} names {call.name!r} twice")
        weights[call.name] = float(weight)
    return weights


def shares_of(weights: Mapping[str, float], key: str) -> dict[str, float]:
    """The share of each source among the draws; sources of weight 0 are left out.

    Raises:
      ValueError: all weights are 0.
    """
    total = sum(weights.values())
    if not total > 0:
        raise ValueError(f"the weights of {key} are all 0; make one positive")
    return {name: weight / total for name, weight in weights.items() if weight}


def offsets_of(count: int, seed: int) -> list[float]:
    """Where in its turn each of so many sources begins; see `draw`."""
    return np.random.default_rng([seed, 3]).uniform(0.1, 0.9, count).tolist()


def draw(shares: Sequence[float], offsets: Sequence[float], index: int) -> tuple[int, int]:
    """Which source the draw `index` is from, and how many draws it had before.

    The j-th row of source k is due at the time (j + oₖ) / pₖ, and draws go by these times. So among any n draws in a
    row, source k has n pₖ to within the number of sources, and after N draws exactly nₖ where pₖ = nₖ / N.

    Args:
      shares: pₖ > 0, sum 1.
      offsets: oₖ within 0 and 1.
      index: of the draw, at least 0.

    Returns:
      (k, j)
    """
    # Σₖ of what was due by a time is that time to within the number of sources, so few steps are left to go.
    start = max(index - len(shares) - 1, 0)
    counts = [max(math.floor(share * start - offset), 0) for share, offset in zip(shares, offsets, strict=True)]
    while True:
        times = [(n + offset) / share for n, offset, share in zip(counts, offsets, shares, strict=True)]
        k = int(np.argmin(times))
        if sum(counts) == index:
            return k, counts[k]
        counts[k] += 1
