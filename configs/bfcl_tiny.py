"""BFCL's stateful functions, on its real tasks with the Qwen2.5 tokenizer.

    python -m experiments.train --config=configs/bfcl_tiny.py

Needs real data: `python -m experiments.prepare_data data bfcl tokenizers`, then `export AGENTR1_DATA=$PWD/data`
(docs/data.md). A policy of random weights learns nothing in it; everything else is real: prompts with all schemas,
calls that change a state, what the user says next, updates, the report. With published weights:
`--config=configs/blank.py:bfcl --config.policy.weights=Qwen/Qwen2.5-7B-Instruct --config.budget.context_tokens=8192
--config.budget.max_steps=20`.
"""

from __future__ import annotations

import ml_collections

from configs import base, multihop_tiny


def get_config() -> ml_collections.ConfigDict:
    """Real tasks, with the decoder of `multihop_tiny`; episodes have up to 15 steps and 4,400 tokens."""
    c = multihop_tiny.get_config()
    c.run_dir = "runs/bfcl_tiny"
    base.set_task(c, "bfcl")
    c.budget.max_steps = 20
    c.budget.response_tokens = 96
    c.budget.context_tokens = 4608
    c.rollout.prefill_width = 128
    c.learner.row_loss_tokens = 1920
    c.learner.rows = 2
    c.warm_start.batch = 4
    c.eval.questions = 8
    return c
