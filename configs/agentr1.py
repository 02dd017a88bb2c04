"""Agent-R1's protocol for multi-hop questions: what its configs share, without an algorithm. See docs/agentr1.md.

    python -m experiments.prepare_data data hotpotqa 2wiki musique tokenizers; export AGENTR1_DATA=$PWD/data
    python -m experiments.train --config=configs/agentr1_grpo.py              an algorithm of it, on a TPU v5e-16
    python -m experiments.train --config=configs/agentr1_grpo.py:v5p-8        on other hardware, a key of HARDWARE

Numbers of arXiv 2511.14460; where the paper is silent, those of the scripts and defaults of its first version, whose
published scores docs/agentr1.md names. Ours are `updates`, `eval` and what HARDWARE holds, which change no result but
for rounding.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import ml_collections

from configs import base

HARDWARE: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {
        # 16 chips of 16 GiB, four to a process. A device decodes with one key head, and half of the weights.
        "v5e-16": {
            "mesh.fsdp": 16,
            "rollout.tensor": 2,
            "rollout.slots": 64,
            "rollout.swap_slots": 16,
            "rollout.attention_group": 32,
            "learner.rows": 16,
            "policy.attention": "splash",
        },
        # 8 cores are 4 chips of 95 GiB, in one process.
        "v5p-8": {
            "mesh.fsdp": 4,
            "rollout.tensor": 2,
            "rollout.slots": 256,
            "rollout.swap_slots": 64,
            "rollout.attention_group": 128,
            "learner.rows": 8,
            "policy.attention": "splash",
        },
        # One host with 8 GPUs of 80 GiB.
        "gpu8": {
            "mesh.fsdp": 8,
            "rollout.tensor": 2,
            "rollout.slots": 256,
            "rollout.swap_slots": 64,
            "rollout.attention_group": 64,
            "learner.rows": 16,
            "policy.attention": "xla",
        },
    }
)


def get_config(hardware: str = "v5e-16") -> ml_collections.ConfigDict:
    """The task, the lengths, the batch and the optimizer of the protocol.

    Raises:
      ValueError: unknown hardware; the message lists what there is.
    """
    c = base.get_config("multihop")
    c.run_dir = "runs/agentr1"
    c.updates = 200
    c.task.multihop.top_k = 5
    c.task.multihop.datasets = ("hotpotqa", "2wikimultihopqa")
    c.task.multihop.eval_datasets = ("hotpotqa", "2wikimultihopqa", "musique")
    c.task.multihop.rewards.gold_passage = 0.0  # what counts is the outcome
    c.task.multihop.rewards.repeated_query = 0.0
    c.tokenizer.path = "{data}/tokenizers/qwen2.5"
    c.policy.weights = "Qwen/Qwen2.5-3B-Instruct"
    c.policy.dtype = "bfloat16"
    c.policy.remat = "full"
    c.budget.max_steps = 5
    c.budget.response_tokens = 1024
    c.budget.observation_tokens = 512
    c.budget.context_tokens = 8192
    c.budget.trajectory_tokens = 8192
    c.rollout.groups = 128
    c.rollout.samples = 5
    c.rollout.slot_tokens = 8192
    c.rollout.prefill_width = 128
    c.rollout.prefill_rows = (4, 16)
    c.rollout.attention_block = 1024
    c.learner.minibatches = 2  # of 64 rows
    c.learner.row_tokens = 8192
    c.learner.row_loss_tokens = 5376  # five responses in full, and one for the critic
    c.loss.chunk = 512
    c.optimizer.lr = 1e-6
    c.optimizer.value_lr = 1e-5
    c.optimizer.warmup = 0
    c.optimizer.b2 = 0.999
    c.optimizer.weight_decay = 0.01
    c.eval.questions = 512
    return on(c, hardware)


def on(c: ml_collections.ConfigDict, hardware: str) -> ml_collections.ConfigDict:
    """The config with the meshes, rows and slots of some hardware.

    Raises:
      ValueError: unknown hardware; the message lists what there is.
    """
    if hardware not in HARDWARE:
        raise ValueError(f"unknown hardware {hardware!r}; choose one of {', '.join(HARDWARE)}")
    c.update_from_flattened_dict(HARDWARE[hardware])
    return c
