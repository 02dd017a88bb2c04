"""Dr.GRPO: GRPO without the std of the group and without the length of the answer (arXiv 2503.20783).

    python -m experiments.train --config=configs/presets/dr_grpo.py[:keydoor]

The argument names the config of `configs/` that it is applied to. The loss is divided by a constant: all tokens that
the trajectories of a minibatch may have. It is computed here: a command line that changes the size of a batch, the
number of steps or `budget.response_tokens` should set `loss.fixed_denominator`, too, or it changes the length of the
gradient.
"""

from __future__ import annotations

import ml_collections

from configs import presets


def get_config(task: str = "quickstart") -> ml_collections.ConfigDict:
    """The preset on a task config of `configs/`."""
    c = presets.on(task, "dr_grpo")
    c.credit.name = "dr_grpo"
    c.loss.aggregate = "fixed"
    trajectories = c.rollout.groups * c.rollout.samples / c.learner.minibatches
    c.loss.fixed_denominator = trajectories * c.budget.max_steps * c.budget.response_tokens
    return c
