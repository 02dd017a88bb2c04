"""GSPO: GRPO's advantages, one ratio and a narrow clip for a whole step (arXiv 2507.18071).

    python -m experiments.train --config=configs/presets/gspo.py[:keydoor]

The argument names the config of `configs/` that it is applied to.
"""

from __future__ import annotations

import ml_collections

from configs import presets


def get_config(task: str = "quickstart") -> ml_collections.ConfigDict:
    """The preset on a task config of `configs/`."""
    c = presets.on(task, "gspo")
    c.credit.name = "grpo"
    c.loss.ratio = "step"
    c.loss.clip = "asymmetric"
    c.loss.clip_low = 3e-4
    c.loss.clip_high = 4e-4
    c.loss.aggregate = "step"
    return c
