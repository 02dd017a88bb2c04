"""ReMax: REINFORCE with the greedy rollout of the row as baseline, one update a batch (arXiv 2310.10505).

    python -m experiments.train --config=configs/presets/remax.py[:keydoor]

The argument names the config of `configs/` that it is applied to.
"""

from __future__ import annotations

import ml_collections

from configs import presets


def get_config(task: str = "quickstart") -> ml_collections.ConfigDict:
    """The preset on a task config of `configs/`."""
    c = presets.on(task, "remax")
    c.credit.name = "remax"
    c.loss.clip = "none"
    c.loss.aggregate = "fixed"  # The sum over tokens, by the number of trajectories.
    c.learner.minibatches = 1
    return c
