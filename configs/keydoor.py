"""Delayed credit: the key of step 1 opens the door of step 7, and random payments lie between.

    python -m experiments.train --config=configs/keydoor.py

About 100 s of CPU time on one core. Seed 0: the door opens in .27 of
the episodes after the warm start (sampled; .40 greedy), and in .89 at the end (1.0 greedy), on layouts that training
has not.
"""

from __future__ import annotations

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    """KeyDoor, a decoder of 0.1M parameters, group-relative credit."""
    c = base.get_config("keydoor")
    c.run_dir = "runs/keydoor"
    c.updates = 80
    c.warm_start.updates = 200
    c.task.keydoor.mistakes = 0.75
    c.task.keydoor.noise = 0.5
    c.tokenizer.vocab_size = 448  # every word is one piece
    c.policy.preset = "tiny"
    c.policy.width = 64
    c.policy.layers = 2
    c.policy.head_dim = 16
    c.policy.hidden = 128
    c.budget.max_steps = 7
    c.budget.response_tokens = 6
    c.budget.observation_tokens = 32
    c.budget.context_tokens = 224
    c.budget.on_truncated_response = "continue"  # it is no action then
    c.rollout.swap_slots = 0
    c.rollout.groups = 8
    c.rollout.prefill_rows = (16, 64)
    c.rollout.prefill_width = 16
    c.loss.chunk = 512
    c.credit.name = "grpo"
    c.optimizer.name = "muon"
    c.optimizer.lr = 5e-4
    c.warm_start.lr = 3e-3
    c.warm_start.demonstrations = 2000
    c.warm_start.practice = 0.0
    c.warm_start.batch = 32
    c.eval.every = 10
    return c
