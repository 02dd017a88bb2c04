"""GRPO: outcomes normalised in their group, each trajectory counts once (DeepSeekMath, arXiv 2402.03300).

    python -m experiments.train --config=configs/presets/grpo.py[:keydoor]

The argument names the config of `configs/` that it is applied to.
"""

from __future__ import annotations

import ml_collections

from configs import presets


def get_config(task: str = "quickstart") -> ml_collections.ConfigDict:
    """The preset on a task config of `configs/`."""
    c = presets.on(task, "grpo")
    c.credit.name = "grpo"
    c.loss.aggregate = "trajectory"
    c.kl.kind = "k3"
    c.kl.coef = 0.001
    return c
