"""StepPO: the step is the action. One value, one advantage and one ratio for each (arXiv 2604.18401).

    python -m experiments.train --config=configs/presets/ppo_step.py[:keydoor]

The argument names the config of `configs/` that it is applied to.
"""

from __future__ import annotations

import ml_collections

from configs import presets


def get_config(task: str = "quickstart") -> ml_collections.ConfigDict:
    """The preset on a task config of `configs/`."""
    c = presets.on(task, "ppo_step")
    c.critic = "shared_trunk"
    c.credit.name = "step_gae"
    c.loss.ratio = "step"
    c.loss.clip = "dual"
    c.loss.clip_low = 3e-4
    c.loss.clip_high = 4e-4
    c.loss.dual_c = 10.0
    c.loss.aggregate = "step"
    return c
