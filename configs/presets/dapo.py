"""DAPO: clip-higher, mean over tokens, groups without signal replaced, a penalty for length (arXiv 2503.14476).

    python -m experiments.train --config=configs/presets/dapo.py[:keydoor]

The argument names the config of `configs/` that it is applied to.
"""

from __future__ import annotations

import ml_collections

from configs import presets


def get_config(task: str = "quickstart") -> ml_collections.ConfigDict:
    """The preset on a task config of `configs/`."""
    c = presets.on(task, "dapo")
    c.credit.name = "grpo"
    c.loss.clip = "asymmetric"
    c.loss.clip_high = 0.28
    c.rollout.dynamic_sampling_groups = c.rollout.groups
    c.shaping.overlong_limit = c.budget.response_tokens
    c.shaping.overlong_buffer = c.budget.response_tokens // 5
    return c
