"""Turn-PPO: PPO whose time is the turn, with one value, one advantage and one clip for each (arXiv 2512.17008).

    python -m experiments.train --config=configs/presets/turn_ppo.py[:keydoor]

The argument names the config of `configs/` that it is applied to.

Gamma and lambda are those that the paper found to work best. OUR READING: the ratio of a turn is the geometric mean of
its tokens' (`step`), its bounds are PPO's, and each turn counts once.
"""

from __future__ import annotations

import ml_collections

from configs import presets


def get_config(task: str = "quickstart") -> ml_collections.ConfigDict:
    """The preset on a task config of `configs/`."""
    c = presets.on(task, "turn_ppo")
    c.critic = "shared_trunk"
    c.credit.name = "step_gae"
    c.credit.args.gamma = 0.99
    c.credit.args.lam = 0.9
    c.loss.ratio = "step"
    c.loss.aggregate = "step"
    return c
