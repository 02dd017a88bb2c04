"""Moves that cannot be taken back: a box is pushed onto its target, over a room of 4 x 4 cells.

    python -m experiments.train --config=configs/sokoban.py

A start for runs of your own; nobody has trained it to its end yet.
"""

from __future__ import annotations

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    """Sokoban, a decoder of 0.1M parameters, group-relative credit."""
    c = base.get_config()
    c.run_dir = "runs/sokoban"
    c.updates = 80
    c.warm_start_updates = 200
    c.task.name = "sokoban"
    c.task.sokoban.mistakes = 0.6
    c.tokenizer.vocab_size = 384  # every word and every cell is one piece
    c.policy.preset = "tiny"
    c.policy.width = 64
    c.policy.layers = 2
    c.policy.head_dim = 16
    c.policy.hidden = 128
    c.budget.max_steps = 12
    c.budget.response_tokens = 4
    c.budget.observation_tokens = 40
    c.budget.context_tokens = 640
    c.budget.on_response_cut = "continue"  # it is no action then
    c.rollout.parking = 0
    c.rollout.length = 704
    c.rollout.groups = 8
    c.rollout.prefill_rows = (16, 64)
    c.rollout.prefill_width = 48
    c.learner.row_tokens = 640
    c.learner.row_reads = 64
    c.learner.rows = 8
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
