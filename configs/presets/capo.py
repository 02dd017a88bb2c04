"""CAPO: the step is the action, in a critic's credit and in a ratio calibrated for length (github.com/AgentR1/CAPO).

    python -m experiments.train --config=configs/presets/capo.py[:keydoor]

The argument names the config of `configs/` that it is applied to.

As published: the critic at the last prompt token, no value after the last step however it ended, and the ratio. The
code of its loss is not published, nor what bounds the ratio: since its noise is that of a token's ratio at any length,
the bounds are PPO's here. (StepPO bounds the step ratio, which shrinks with length, by 3e-4; see `ppo_step`.) Whether
the mean that the ratio is centred by is over tokens or actions is not said, either: `loss.ratio_mean`.
"""

from __future__ import annotations

import ml_collections

from configs import presets


def get_config(task: str = "quickstart") -> ml_collections.ConfigDict:
    """The preset on a task config of `configs/`."""
    c = presets.on(task, "capo")
    c.critic = "shared_trunk"
    c.credit.name = "step_gae"
    c.shaping.truncation_is_terminal = True
    c.loss.ratio = "centred_step"
    c.loss.aggregate = "step"
    return c
