"""REINFORCE on steps: whitened returns to go; what Agent-R1 v2 calls REINFORCE++ (arXiv 2511.14460).

    python -m experiments.train --config=configs/presets/reinforce.py[:keydoor]

The argument names the config of `configs/` that it is applied to.
"""

from __future__ import annotations

import ml_collections

from configs import presets


def get_config(task: str = "quickstart") -> ml_collections.ConfigDict:
    """The preset on a task config of `configs/`."""
    c = presets.on(task, "reinforce")
    c.credit.name = "reinforce"
    return c
