"""Qwen2.5-3B on a TPU slice: real questions, contexts of 4096 tokens. Compiled for v5e, never run.

    python -m experiments.train --config=configs/scale_qwen2_5_3b.py --dry_run --topology=v5e:4x4

prints what each device would hold, without a TPU (docs/sharding.md). A run starts on all workers of a v5e-16, from
weights instead of a preset:

    python -m experiments.train --config=configs/scale_qwen2_5_3b.py --config.policy.preset= \
        --config.policy.weights=Qwen/Qwen2.5-3B-Instruct

On another slice add --config.hardware=auto.
"""

from __future__ import annotations

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    """3.1B parameters, AdamW in float32 over 16 devices, step-level credit by groups."""
    c = base.get_config("multihop")
    c.run_dir = "runs/scale_qwen2_5_3b"
    c.updates = 200
    c.hardware = "v5e-16"
    c.tokenizer.path = "{data}/tokenizers/qwen2.5"
    c.policy.preset = "qwen2.5-3b"
    c.budget.max_steps = 5
    c.budget.response_tokens = 256
    c.budget.observation_tokens = 512
    c.budget.context_tokens = 4096
    c.budget.trajectory_tokens = 8192
    c.budget.on_truncated_response = "continue"
    c.budget.final_answer_step = True
    c.rollout.groups = 32
    c.rollout.samples = 8
    c.rollout.tensor = 2  # as many as there are key heads: each device holds one of them, and half of the weights
    c.rollout.swap_slots = 32
    c.optimizer.lr = 1e-6
    c.eval.questions = 512
    c.eval.every = 20
    return c
