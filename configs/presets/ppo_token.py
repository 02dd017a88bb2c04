"""PPO over tokens: a critic at every token, GAE along the whole trajectory (Schulman et al., arXiv 1707.06347).

    python -m experiments.train --config=configs/presets/ppo_token.py[:keydoor]

The argument names the config of `configs/` that it is applied to.
"""

from __future__ import annotations

import ml_collections

from configs import presets


def get_config(task: str = "quickstart") -> ml_collections.ConfigDict:
    """The preset on a task config of `configs/`."""
    c = presets.on(task, "ppo_token")
    c.critic = "shared_trunk"
    c.credit.name = "token_gae"
    return c
