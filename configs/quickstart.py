"""An agent learns to use a search tool, from scratch, on a laptop CPU.

    bash launch/quickstart.sh        (python -m experiments.train --config=configs/quickstart.py)
"""

from __future__ import annotations

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    """HopWorld, a decoder of 0.7M parameters, step-level credit."""
    c = base.get_config()
    c.run_dir = "runs/quickstart"
    c.updates = 40
    c.warm_start_updates = 400
    c.task.name = "hopworld"
    c.tokenizer.vocab_size = 1536
    c.budget.max_steps = 6
    c.budget.context_tokens = 384
    c.rollout.live_lengths = (192, 384)
    c.learner.row_tokens = 384
    c.learner.row_reads = 128
    c.budget.response_tokens = 40
    c.budget.observation_tokens = 120
    c.credit.name = "grpo"
    return c
