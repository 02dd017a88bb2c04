"""`multihop_small` with 27M parameters, for one accelerator: docs/results/multihop.md. Never run yet.

CONFIG=multihop_medium bash launch/multihop_small.sh runs/multihop_medium
"""

from __future__ import annotations

import ml_collections

from configs import multihop_small


def get_config() -> ml_collections.ConfigDict:
    """Width 512, 8 layers, three passages a search in full sentences, all passages of the corpora read three times."""
    c = multihop_small.get_config()
    c.run_dir = "runs/multihop_medium"
    c.updates = 100
    c.warm_start.updates = 2000
    c.task.multihop.top_k = 3
    c.task.multihop.passage_characters = 384
    c.policy.width = 512
    c.policy.layers = 8
    c.policy.heads = 8
    c.policy.kv_heads = 4
    c.policy.head_dim = 64
    c.policy.hidden = 1408
    c.policy.dtype = "bfloat16"
    c.budget.observation_tokens = 512
    c.budget.context_tokens = 2560
    c.rollout.groups = 32
    c.rollout.slots = 256
    c.rollout.swap_slots = 64
    c.rollout.attention_block = 512
    c.rollout.attention_group = 64
    c.rollout.prefill_width = 128
    c.learner.row_loss_tokens = 768
    c.learner.rows = 16
    c.loss.chunk = 4096
    c.pretrain.updates = 1000
    c.pretrain.batch = 256
    c.pretrain.lr = 1e-3
    c.pretrain.rows = 64
    c.warm_start.batch = 64
    c.warm_start.lr = 1e-3
    return c
