"""The same loop on real questions: HotpotQA and 2WikiMultihopQA, BM25 over their passages, the Qwen2.5 tokenizer.

    python -m experiments.train --config=configs/multihop_tiny.py --config.updates=2

Needs real data: `python -m experiments.prepare_data data hotpotqa 2wiki tokenizers --questions=2500`, then `export
AGENTR1_DATA=$PWD/data` (docs/data.md). A policy of random weights learns nothing in it; everything else is real:
prompts, tool schemas, passages, EM and F1, updates, the report. About three minutes on 2 CPU cores.
"""

from __future__ import annotations

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    """Real questions, a decoder of 10M parameters that is nearly all embedding."""
    c = base.get_config("multihop")
    c.run_dir = "runs/multihop_tiny"
    c.updates = 2
    c.warm_start.updates = 4
    c.task.multihop.top_k = 3
    c.tokenizer.path = "{data}/tokenizers/qwen2.5"
    c.policy.preset = "tiny"
    c.policy.width = 64
    c.policy.layers = 2
    c.policy.head_dim = 16
    c.policy.hidden = 128
    c.critic = "shared_trunk"
    c.credit.name = "step_gae"
    c.budget.max_steps = 4
    c.budget.response_tokens = 48
    c.budget.observation_tokens = 192
    c.budget.context_tokens = 1280
    c.budget.on_truncated_response = "continue"
    c.rollout.groups = 4
    c.rollout.samples = 4
    c.rollout.slots = 16
    c.rollout.swap_slots = 4
    c.rollout.prefill_width = 64
    c.rollout.prefill_rows = (2, 8)
    c.rollout.attention_block = 128
    c.learner.row_loss_tokens = 384
    c.learner.rows = 4
    c.loss.chunk = 128
    c.warm_start.demonstrations = 32
    c.warm_start.practice = 0.0
    c.warm_start.batch = 8
    c.eval.questions = 16
    c.eval.every = 0
    return c
