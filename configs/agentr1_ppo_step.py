"""StepPO by Agent-R1's protocol, with Qwen2.5-3B: docs/agentr1.md. Compiled, never run.

    python -m experiments.train --config=configs/agentr1_ppo_step.py
    python -m experiments.train --config=configs/agentr1_ppo_step.py:v5e-16 --dry_run --topology=v5e:4x4
    python -m experiments.train --config=configs/agentr1_ppo_step.py:v5p-8 --dry_run --topology=v5p:2x2x1

Fits, in GiB of each device while rolling out and learning: v5e-16 13.1 and 14.1 of 16, v5p-8 43.5 and 39.7 of 95, one
host of 8 GPUs (`:h100x8`, counted, not compiled) 23.6 and 25.2 of 80.

To expect: nothing is published for this model.
"""

from __future__ import annotations

import ml_collections

from configs.presets import ppo_step


def get_config(hardware: str = "v5e-16") -> ml_collections.ConfigDict:
    """StepPO: one value, advantage and ratio for each step, with a critic of its own; no KL and no warm-up."""
    c = ppo_step.get_config("agentr1")
    c.hardware = hardware
    c.critic = "separate"
    c.credit.args.gamma = 0.99
    c.credit.args.lam = 1.0
    c.loss.value_coef = 1.0
    return c
