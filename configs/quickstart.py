"""An agent learns to use a search tool, from scratch, on a laptop CPU.

    bash launch/quickstart.sh        (python -m experiments.train --config=configs/quickstart.py)

Two CPU cores are enough. Expect an exact match on unseen worlds of about 0.4 after the warm start (sampled) and
about 0.9 at the end (greedy); docs/results/quickstart.md has the figures of three seeds.
"""

from __future__ import annotations

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    """HopWorld, a decoder of 0.62M parameters, step-level credit."""
    c = base.get_config("hopworld")
    c.run_dir = "runs/quickstart"
    c.updates = 28
    c.warm_start.updates = 540
    c.task.hopworld.top_k = 2
    c.policy.preset = "tiny"
    c.policy.kv_heads = 4  # Copying of names takes heads rather than a wide MLP.
    c.policy.hidden = 192
    c.tokenizer.vocab_size = 1536  # every word of HopWorld is one piece
    c.budget.max_steps = 6
    c.budget.response_tokens = 40
    c.budget.observation_tokens = 120
    c.budget.context_tokens = 320
    c.rollout.swap_slots = 0  # a search takes less than a millisecond
    c.rollout.slot_tokens = 320
    c.learner.row_tokens = 640
    c.learner.row_loss_tokens = 512
    c.learner.rows = 2
    c.learner.packing = "prefix_tree"  # The samples of a question search alike.
    c.learner.minibatches = 2
    c.loss.chunk = 512
    c.critic = "shared_trunk"
    c.credit.name = "step_gae"
    c.credit.args.lam = 0.95
    c.optimizer.name = "muon"
    c.optimizer.lr = 3e-4
    c.warm_start.batch = 40
    c.warm_start.lr = 5e-3
    c.warm_start.demonstrations = 10_000
    c.warm_start.practice = 0.5
    return c
