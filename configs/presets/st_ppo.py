"""ST-PPO: PPO over tokens, with one ratio for a turn and a gradient that shrinks where it clips (arXiv 2511.20718).

    python -m experiments.train --config=configs/presets/st_ppo.py[:keydoor]

The argument names the config of `configs/` that it is applied to.

The paper's text was not at hand; from its abstract, its reviews and summaries: advantages of token GAE, the geometric
mean of a turn's ratios, bounds of .2, the mean over a trajectory's tokens, and the gradient divided by the norm of what
the clip removed from it. OUR READING: a norm below 1 divides nothing, since the normalisation is there to weigh
unreliable updates down, and the decoder's gradient alone is divided (`batch_gradient` in `learner/update.py`).
"""

from __future__ import annotations

import ml_collections

from configs import presets


def get_config(task: str = "quickstart") -> ml_collections.ConfigDict:
    """The preset on a task config of `configs/`."""
    c = presets.on(task, "st_ppo")
    c.critic = "shared_trunk"
    c.credit.name = "token_gae"
    c.loss.ratio = "step"
    c.loss.aggregate = "trajectory"
    c.loss.clip_bias_norm = True
    return c
