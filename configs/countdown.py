"""Countdown: three numbers up to 12, + and -, a calculator and six steps.

python -m experiments.train --config=configs/countdown.py
"""

from __future__ import annotations

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    """Countdown, a decoder of 0.3M parameters, step-level credit."""
    c = base.get_config("countdown")
    c.run_dir = "runs/countdown"
    c.updates = 180
    c.warm_start.updates = 500
    c.tokenizer.vocab_size = 512  # every number is one piece
    c.policy.preset = "tiny"
    c.policy.width = 96
    c.policy.layers = 3
    c.policy.head_dim = 24
    c.policy.hidden = 256
    c.critic = "shared_trunk"
    c.budget.max_steps = 6
    c.budget.response_tokens = 32
    c.budget.observation_tokens = 24
    c.budget.context_tokens = 384
    c.rollout.swap_slots = 0  # the calculator takes less than a millisecond
    c.learner.row_loss_tokens = 192
    c.loss.chunk = 512
    c.credit.name = "step_gae"
    c.credit.args.lam = 0.95
    c.shaping.truncation_is_terminal = True  # six steps are part of the task
    c.optimizer.name = "muon"
    c.optimizer.lr = 6e-4
    c.optimizer.schedule = "linear"
    c.warm_start.demonstrations = 12000
    c.warm_start.practice = 0.0
    c.warm_start.batch = 40
    return c
