"""Seeds are stable and distinct."""

from __future__ import annotations

import itertools

from agentr1_jax.runtime.seeds import generator, seed_of


def test_seeds_are_the_same_on_every_machine():
    # Written down from the first run: a change would make every recorded run irreproducible.
    assert seed_of(0, "rl", 0, 0) == 2272349439875418675
    assert seed_of(7, "warm start") == 6579140336647648540
    assert generator(3, "order", 2).permutation(6).tolist() == [3, 5, 1, 0, 2, 4]


def test_seeds_differ_wherever_anything_differs():
    purposes, indices = ("rl", "eval", "demonstration"), range(20)
    seeds = {seed_of(run, p, i, j) for run, p, i, j in itertools.product(range(3), purposes, indices, indices)}
    assert len(seeds) == 3 * 3 * 20 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed_of(0, "rl"), seed_of(0, "rl", 0), seed_of(0, "rl", 0, 0)}) == 3
