"""The config in a JSON file, such as the `config.json` that a run leaves in its folder.

    python -m experiments.train --config=configs/resolved.py:runs/quickstart/config.json --config.run_dir=... [...]

For another run that differs in what the command line says; `experiments.ablate` starts its runs by such files.
"""

from __future__ import annotations

import json

import ml_collections

from configs import base


def get_config(path: str) -> ml_collections.ConfigDict:
    """The base config with every value of the file."""
    with open(path, encoding="utf-8") as lines:
        values = json.load(lines)
    config = base.get_config(*base.task_names(values["task"]))
    with config.unlocked():
        config.update(values)
    return config
