"""Published algorithms as configs. Each file holds the lines in which it differs from what all of them share.

    python -m experiments.train --config=configs/presets/gspo.py              on HopWorld, as configs/quickstart.py
    python -m experiments.train --config=configs/presets/gspo.py:keydoor      on another config of configs/

What they share is here: the algorithm of `configs/base.py` (GRPO's advantages, PPO's loss over tokens, no critic, no
KL), and two minibatches for each batch, since ratios and clips differ only where the policy has moved.
"""

from __future__ import annotations

import importlib
import pathlib

import ml_collections

from configs import base

ALGORITHM = ("credit", "critic", "loss", "kl", "correction", "shaping")


def on(task: str, preset: str) -> ml_collections.ConfigDict:
    """The config `configs/{task}.py` with the algorithm of the base config, and the preset in the name of its folder.

    Raises:
      ValueError: there is no such config; the message lists them.
    """
    known = sorted(path.stem for path in pathlib.Path(base.__file__).parent.glob("*.py"))
    known = [stem for stem in known if stem not in ("__init__", "base", "resolved")]
    if task not in known:
        raise ValueError(f"no config {task!r} to apply a preset to; choose one of {', '.join(known)}")
    c, default = importlib.import_module(f"configs.{task}").get_config(), base.get_config()
    chunk = c.loss.chunk
    for section in ALGORITHM:
        c[section] = default[section]
    c.loss.chunk = chunk  # of memory, not of the algorithm
    c.run_dir = f"{c.run_dir}_{preset}"
    c.learner.minibatches = 2
    return c
