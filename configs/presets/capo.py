"""CAPO, OUR READING: ratios of steps centred over the minibatch, on GRPO's advantages; its loss code is unpublished.

    python -m experiments.train --config=configs/presets/capo.py[:keydoor]

The argument names the config of `configs/` that it is applied to.
"""

from __future__ import annotations

import ml_collections

from configs import presets


def get_config(task: str = "quickstart") -> ml_collections.ConfigDict:
    """The preset on a task config of `configs/`."""
    c = presets.on(task, "capo")
    c.credit.name = "grpo"
    c.loss.ratio = "capo"
    c.loss.clip = "asymmetric"
    c.loss.aggregate = "step"
    return c
