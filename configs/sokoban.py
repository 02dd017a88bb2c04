"""Moves that cannot be taken back: a box is pushed onto its target, over a room of 4 x 4 cells.

    python -m experiments.train --config=configs/sokoban.py

A start for runs of your own; nobody has trained it to its end yet.
"""

from __future__ import annotations

import ml_collections

from configs import base, frozenlake


def get_config() -> ml_collections.ConfigDict:
    """Sokoban, with the decoder and the algorithm of FrozenLake."""
    c = frozenlake.get_config()
    c.run_dir = "runs/sokoban"
    base.set_task(c, "sokoban")
    c.task.sokoban.mistakes = 0.6
    c.tokenizer.vocab_size = 384  # every word and every cell is one piece
    c.budget.max_steps = 12
    c.budget.response_tokens = 4
    c.budget.observation_tokens = 40
    c.budget.context_tokens = 640
    c.rollout.prefill_width = 48
    return c
