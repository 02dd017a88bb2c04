"""A memory task: who is where, after more reports than a context holds.

python -m experiments.train --config=configs/whereabouts.py                                   # summaries
python -m experiments.train --config=configs/whereabouts.py '--config.context.rule=window(4)' --config.run_dir=runs/w
"""

from __future__ import annotations

import ml_collections

from configs import base


def get_config(pretrained: str = "") -> ml_collections.ConfigDict:
    """Whereabouts, a decoder of 0.4M parameters, contexts of 192 tokens.

    `configs/whereabouts.py:FOLDER` starts from a policy that `experiments.export_hf` wrote, without pretraining.
    """
    c = base.get_config("whereabouts")
    c.run_dir = "runs/whereabouts"
    c.updates = 50
    c.warm_start.updates = 120
    if pretrained:
        c.policy.weights = c.tokenizer.path = pretrained
    else:
        _pretrain(c)
    c.critic = "shared_trunk"
    c.context.rule = "summary(turns=2)"
    c.context.summary_tokens = 24
    c.budget.max_steps = 11
    c.budget.response_tokens = 4
    c.budget.observation_tokens = 48
    c.budget.context_tokens = 192
    c.budget.trajectory_tokens = 1024
    c.budget.on_truncated_response = "continue"
    c.rollout.swap_slots = 0
    c.rollout.groups = 8
    c.learner.row_tokens = 384
    c.learner.row_loss_tokens = 96
    c.loss.chunk = 512
    c.loss.aggregate = "step"  # an answer of one token counts as much as a summary of twenty
    c.credit.name = "step_gae"
    c.credit.args.lam = 0.95
    c.optimizer.name = "muon"
    c.optimizer.lr = 5e-4
    c.warm_start.demonstrations = 2000
    c.warm_start.practice = 0.0
    c.warm_start.batch = 16
    return c


def _pretrain(c: ml_collections.ConfigDict) -> None:
    """A decoder from scratch, pretrained on stories of the task: it must learn to look up before it can remember."""
    c.tokenizer.vocab_size = 512  # every word is one piece
    c.policy.preset = "tiny"
    c.policy.width = 96
    c.policy.layers = 3
    c.policy.head_dim = 24
    c.policy.hidden = 256
    c.pretrain.updates = 600
    c.pretrain.texts = 20_000
    c.pretrain.tokens = 384
    c.pretrain.batch = 32
    c.pretrain.lr = 6e-3
    c.pretrain.row_tokens = 640
