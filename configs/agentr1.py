r"""Agent-R1's protocol for multi-hop questions: what its configs share, without an algorithm. See docs/agentr1.md.

    python -m experiments.prepare_data data hotpotqa 2wiki musique tokenizers; export AGENTR1_DATA=$PWD/data
    python -m experiments.train --config=configs/agentr1_grpo.py              an algorithm of it, on a TPU v5e-16
    python -m experiments.train --config=configs/agentr1_grpo.py:v5p-8        on other hardware
    bash launch/tpu_vm.sh --name=mine --zone=us-west4-a --type=v5litepod-16 --spot --detach --data=gs://BUCKET/data \
      --config=configs/agentr1_grpo.py --config.run_dir=gs://BUCKET/runs/grpo  from elsewhere: docs/pods.md

Numbers of arXiv 2511.14460; where the paper is silent, those of the scripts and defaults of its first version, whose
published scores docs/agentr1.md names. Ours are `updates`, `eval` and what the hardware decides
(`agentr1_jax/train/defaults.py`), which changes no result but for rounding.
"""

from __future__ import annotations

import ml_collections

from configs import base


def get_config(hardware: str = "v5e-16") -> ml_collections.ConfigDict:
    """The task, the lengths, the batch and the optimizer of the protocol; `hardware` is the key of that name."""
    c = base.get_config("multihop")
    c.run_dir = "runs/agentr1"
    c.updates = 200
    c.hardware = hardware
    c.task.multihop.top_k = 5
    c.task.multihop.datasets = ("hotpotqa", "2wikimultihopqa")
    c.task.multihop.eval_datasets = ("hotpotqa", "2wikimultihopqa", "musique")
    c.task.multihop.rewards.gold_passage = 0.0  # what counts is the outcome
    c.task.multihop.rewards.repeated_query = 0.0
    c.tokenizer.path = "{data}/tokenizers/qwen2.5"
    c.policy.weights = "Qwen/Qwen2.5-3B-Instruct"
    c.budget.max_steps = 5
    c.budget.response_tokens = 1024
    c.budget.observation_tokens = 512
    c.budget.context_tokens = 8192
    c.budget.trajectory_tokens = 8192
    c.rollout.groups = 128
    c.rollout.samples = 5
    c.rollout.tensor = 2  # a device decodes with one of the two key heads, and half of the weights
    c.learner.minibatches = 2  # of 64 rows
    c.learner.row_loss_tokens = 5376  # five responses in full, and one for the critic
    c.loss.chunk = 512
    c.optimizer.lr = 1e-6
    c.optimizer.value_lr = 1e-5
    c.optimizer.warmup = 0
    c.optimizer.b2 = 0.999
    c.optimizer.weight_decay = 0.01
    c.eval.questions = 512
    return c
