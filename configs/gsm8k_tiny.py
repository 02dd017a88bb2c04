"""GSM8K with a calculator, on real problems with the Qwen2.5 tokenizer.

    python -m experiments.train --config=configs/gsm8k_tiny.py

Needs real data: `python -m experiments.prepare_data data gsm8k tokenizers`, then `export AGENTR1_DATA=$PWD/data`
(docs/data.md). A policy of random weights learns nothing in it; everything else is real: prompts, tool schemas,
calculations, results, updates, the report. With published weights:
`--config=configs/blank.py:gsm8k --config.policy.weights=Qwen/Qwen2.5-1.5B-Instruct`.
`--config.task.gsm8k.tool=python` gives the policy a sandboxed Python in place of the calculator.
"""

from __future__ import annotations

import ml_collections

from configs import base, multihop_tiny


def get_config() -> ml_collections.ConfigDict:
    """Real problems, with the decoder and the batch of `multihop_tiny`."""
    c = multihop_tiny.get_config()
    c.run_dir = "runs/gsm8k_tiny"
    base.set_task(c, "gsm8k")
    c.budget.max_steps = 6
    c.budget.response_tokens = 64
    c.budget.observation_tokens = 96
    c.budget.context_tokens = 1024
    c.learner.row_loss_tokens = 448
    return c
