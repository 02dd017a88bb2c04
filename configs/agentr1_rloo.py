"""RLOO by Agent-R1's protocol, with Qwen2.5-3B: docs/agentr1.md. Compiled, never run.

    python -m experiments.train --config=configs/agentr1_rloo.py
    python -m experiments.train --config=configs/agentr1_rloo.py:v5e-16 --dry_run --topology=v5e:4x4
    python -m experiments.train --config=configs/agentr1_rloo.py:v5p-8 --dry_run --topology=v5p:2x2x1

Fits, in GiB of each device while rolling out and learning: v5e-16 11.3 and 10.9 of 16, v5p-8 36.3 and 28.0 of 95, one
host of 8 GPUs (`:h100x8`, counted, not compiled) 19.3 and 15.7 of 80.

To expect: nothing is published for this model.
"""

from __future__ import annotations

import ml_collections

from configs import agentr1_grpo


def get_config(hardware: str = "v5e-16") -> ml_collections.ConfigDict:
    """RLOO as Agent-R1 has it: its GRPO with another advantage."""
    c = agentr1_grpo.get_config(hardware)
    c.run_dir = "runs/agentr1_rloo"
    c.credit.name = "rloo"
    return c
