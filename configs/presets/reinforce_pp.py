"""REINFORCE++: whitened returns over tokens, the KL in the reward (arXiv 2501.03262).

    python -m experiments.train --config=configs/presets/reinforce_pp.py[:keydoor]

The argument names the config of `configs/` that it is applied to.
"""

from __future__ import annotations

import ml_collections

from configs import presets


def get_config(task: str = "quickstart") -> ml_collections.ConfigDict:
    """The preset on a task config of `configs/`."""
    c = presets.on(task, "reinforce_pp")
    c.credit.name = "reinforce_pp"
    c.kl.kind = "k1"
    c.kl.where = "reward"
    c.kl.coef = 0.001
    return c
