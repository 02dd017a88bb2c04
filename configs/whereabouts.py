"""A memory task: who is where, after more reports than a context holds.

python -m experiments.train --config=configs/whereabouts.py                                   # summaries
python -m experiments.train --config=configs/whereabouts.py '--config.context.rule=window(5)' --config.run_dir=runs/w
"""

from __future__ import annotations

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    """Whereabouts, a decoder of 0.4M parameters, contexts of 192 tokens."""
    c = base.get_config()
    c.run_dir = "runs/whereabouts"
    c.updates = 60
    c.warm_start_updates = 300
    c.task.name = "whereabouts"
    c.tokenizer.vocab_size = 512  # every word is one piece
    c.policy.preset = "tiny"
    c.policy.width = 96
    c.policy.layers = 3
    c.policy.head_dim = 24
    c.policy.hidden = 256
    c.critic = "shared_trunk"
    c.context.rule = "summary(turns=2)"
    c.context.summary_tokens = 24
    c.budget.max_steps = 11
    c.budget.response_tokens = 4
    c.budget.observation_tokens = 48
    c.budget.context_tokens = 192
    c.budget.trajectory_tokens = 1024
    c.budget.on_response_cut = "continue"
    c.rollout.parking = 0
    c.rollout.length = 192
    c.rollout.groups = 8
    c.learner.row_tokens = 384
    c.learner.row_reads = 96
    c.learner.rows = 8
    c.loss.chunk = 512
    c.credit.name = "step_gae"
    c.credit.args.lam = 0.95
    c.optimizer.name = "muon"
    c.optimizer.lr = 5e-4
    c.warm_start.demonstrations = 3000
    c.warm_start.practice = 0.0
    c.warm_start.batch = 32
    return c
