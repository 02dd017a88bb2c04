"""REINFORCE++ by Agent-R1's protocol, with Qwen2.5-3B: docs/agentr1.md. Compiled, never run.

    python -m experiments.train --config=configs/agentr1_reinforce_pp.py
    python -m experiments.train --config=configs/agentr1_reinforce_pp.py:v5e-16 --dry_run --topology=v5e:4x4
    python -m experiments.train --config=configs/agentr1_reinforce_pp.py:v5p-8 --dry_run --topology=v5p:2x2x1

Fits, in GiB of each device while rolling out and learning: v5e-16 11.3 and 10.8 of 16, v5p-8 36.3 and 28.0 of 95, one
host of 8 GPUs (`:h100x8`, counted, not compiled) 19.3 and 15.7 of 80.

To expect, on the original data: EM .3768 on HotpotQA, .4796 on 2Wiki, .1336 on MuSiQue, .3300 in the mean
(arXiv 2511.14460v1; Naive RAG .1328).
"""

from __future__ import annotations

import ml_collections

from configs.presets import reinforce_pp


def get_config(hardware: str = "v5e-16") -> ml_collections.ConfigDict:
    """REINFORCE++: returns of tokens, whitened over the batch; k1 in the reward."""
    c = reinforce_pp.get_config("agentr1")
    c.hardware = hardware
    c.credit.args.gamma = 1.0
    c.loss.entropy_coef = 0.001
    return c
