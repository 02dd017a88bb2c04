"""Run folders with a config, a tokenizer and a checkpoint, without any training."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import tiny

from agentr1_jax.policy.params import join
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.checkpoint import Checkpoints
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build
from configs import quickstart
from experiments.setup import change_config, make_task, read_settings

SMALL = {
    "policy.width": 32,
    "policy.layers": 2,
    "policy.hidden": 64,
    "policy.head_dim": 8,
    "tokenizer.texts": 400,
}


def store_run(folder, **changes):
    """Write the folder of a run with checkpoint 3 of random parameters; return its policy and its whole decoder."""
    config = change_config(quickstart.get_config(), {**SMALL, **changes, "run_dir": str(folder)})
    settings = read_settings(config)
    task = make_task(settings, ToolMetrics())
    tokenizer = build.make_tokenizer(settings, task, resumes=False)
    policy, mesh = build.make_policy(settings, tokenizer), tiny.mesh()
    state = build.make_state_builder(settings, policy, mesh).init()
    # Fresh adapters change nothing.
    state = dataclasses.replace(state, params=jax.tree.map(lambda x: x + 0.125, state.params))
    RunFolder(str(folder)).write_config(configs.resolve(config))
    with contextlib.closing(Checkpoints(folder, 1)) as checkpoints:
        checkpoints.save(3, state, {})
    return policy, join({"decoder": state.params["decoder"]}, build.make_frozen(settings, policy, mesh))["decoder"]
