"""PPO with token-level advantages by Agent-R1's protocol, with Qwen2.5-3B: docs/agentr1.md. Compiled, never run.

    python -m experiments.train --config=configs/agentr1_ppo_token.py
    python -m experiments.train --config=configs/agentr1_ppo_token.py:v5e-16 --dry_run --topology=v5e:4x4
    python -m experiments.train --config=configs/agentr1_ppo_token.py:v5p-8 --dry_run --topology=v5p:2x2x1

Fits, in GiB of each device while rolling out and learning: v5e-16 13.5 and 14.5 of 16, v5p-8 44.9 and 41.1 of 95, one
host of 8 GPUs (`:h100x8`, counted, not compiled) 23.6 and 25.2 of 80.

To expect, on the original data: EM .4136 on HotpotQA, .5468 on 2Wiki, .1552 on MuSiQue, .3719 in the mean
(arXiv 2511.14460v1; Naive RAG .1328).
"""

from __future__ import annotations

import ml_collections

from configs.presets import ppo_token


def get_config(hardware: str = "v5e-16") -> ml_collections.ConfigDict:
    """PPO over tokens with a critic of its own, which learns alone at first; k1 in the reward."""
    c = ppo_token.get_config("agentr1")
    c.hardware = hardware
    c.critic = "separate"
    c.credit.args.gamma = 1.0
    c.credit.args.lam = 1.0
    c.loss.value_coef = 1.0
    c.loss.entropy_coef = 0.001
    c.kl.kind = "k1"
    c.kl.where = "reward"
    c.kl.coef = 0.001
    c.optimizer.critic_warmup = 5
    return c
