"""GRPO by Agent-R1's protocol, with Qwen2.5-3B: docs/agentr1.md. Compiled, never run.

    python -m experiments.train --config=configs/agentr1_grpo.py
    python -m experiments.train --config=configs/agentr1_grpo.py:v5e-16 --dry_run --topology=v5e:4x4
    python -m experiments.train --config=configs/agentr1_grpo.py:v5p-8 --dry_run --topology=v5p:2x2x1

Fits, in GiB of each device while rolling out and learning: v5e-16 11.3 and 10.9 of 16, v5p-8 36.3 and 28.0 of 95, one
host of 8 GPUs (`:h100x8`, counted, not compiled) 19.3 and 15.7 of 80.

To expect, on the original data: EM .4405 on HotpotQA, .5741 on 2Wiki, .1485 on MuSiQue, .3877 in the mean
(arXiv 2511.14460v1; Naive RAG .1328).
"""

from __future__ import annotations

import ml_collections

from configs.presets import grpo


def get_config(hardware: str = "v5e-16") -> ml_collections.ConfigDict:
    """GRPO: outcomes normalised in their group, the clipped loss over tokens, k3 in the loss."""
    c = grpo.get_config("agentr1")
    c.hardware = hardware
    c.loss.aggregate = "token"
    c.loss.entropy_coef = 0.001
    return c
