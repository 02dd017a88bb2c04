"""REINFORCE++ with the group's mean as baseline, whitened over the batch (arXiv 2501.03262).

    python -m experiments.train --config=configs/presets/reinforce_pp_baseline.py[:keydoor]

The argument names the config of `configs/` that it is applied to.
"""

from __future__ import annotations

import ml_collections

from configs import presets


def get_config(task: str = "quickstart") -> ml_collections.ConfigDict:
    """The preset on a task config of `configs/`."""
    c = presets.on(task, "reinforce_pp_baseline")
    c.credit.name = "reinforce_pp_baseline"
    c.kl.kind = "k2"
    c.kl.coef = 0.001
    return c
