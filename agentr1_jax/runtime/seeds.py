"""Random choices keyed by what they are for, never by slot, place in a batch or order of arrival."""

from __future__ import annotations

import zlib

import numpy as np


def seed_of(run_seed: int, purpose: str, *indices: int) -> int:
    """A 63-bit seed for one purpose, e.g. `seed_of(0, "rollout", visit, sample)`."""
    # SeedSequence pads its entropy with zeros, so that without the count (5,) and (5, 0) would be one seed.
    entropy = [run_seed, zlib.crc32(purpose.encode()), len(indices), *indices]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


def generator(run_seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """A numpy generator for one purpose."""
    return np.random.default_rng(seed_of(run_seed, purpose, *indices))
