"""A policy of 1.6M parameters learns to search for real multi-hop questions, on a laptop CPU: docs/results/multihop.md.

    bash launch/multihop_small.sh        (warm start, five algorithms, controls, evaluations: two and a half hours)
    python -m experiments.train --config=configs/multihop_small.py --config.run_dir=... --config.updates=0
    python -m experiments.train --config=configs/presets/grpo.py:multihop_small --config.warm_start.init_from=...

It is pretrained on the passages of HotpotQA and 2WikiMultihopQA, imitates an expert that searches for what it has read
of, and is then paid for each gold passage that it finds. MuSiQue is evaluated only. 400 training questions of each data
set are held out. Pretraining, warm start and RL by one algorithm take less than an hour. It needs real data: `python -m
experiments.prepare_data data hotpotqa 2wiki musique tokenizers --questions=2500`, then `export AGENTR1_DATA=$PWD/data`;
the results are of another selection of these sets.
"""

from __future__ import annotations

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    """BM25, two short passages a search, four searches and an answer, a tokenizer of 6,400 ids."""
    c = base.get_config("multihop")
    c.run_dir = "runs/multihop_small"
    c.updates = 40
    c.warm_start.updates = 1200
    c.task.multihop.eval_datasets = ("hotpotqa", "2wikimultihopqa", "musique")
    c.task.multihop.held_out = 400
    c.task.multihop.held_out_after = 400  # the first 400 of 2Wiki chose this config
    c.task.multihop.instruction = "Search, then answer."
    c.task.multihop.top_k = 2
    c.task.multihop.passage_characters = 192  # names are mostly told in the first sentence
    c.task.multihop.rewards.answer = 0.1  # a policy of this size guesses: much of it is noise
    c.task.multihop.rewards.gold_passage = 0.25
    c.task.multihop.rewards.repeated_query = 0.0  # else trying once more costs before it pays
    c.tokenizer.path = "{data}/tokenizers/minimind-6400"
    c.agent.tell_tools = False
    c.policy.preset = "tiny"
    c.policy.layers = 4
    c.budget.max_steps = 5
    c.budget.response_tokens = 96
    c.budget.observation_tokens = 192
    c.budget.context_tokens = 1024
    c.budget.on_truncated_response = "continue"
    c.rollout.swap_slots = 16
    c.rollout.prefill_width = 64
    c.rollout.prefill_rows = (2, 8)
    c.rollout.attention_block = 128
    c.learner.packing = "prefix_tree"  # the samples of a question share much more than its prompt
    c.learner.row_loss_tokens = 384
    c.learner.rows = 4
    c.loss.chunk = 512
    c.optimizer.name = "muon"
    c.optimizer.lr = 5e-4
    c.optimizer.warmup = 2
    c.optimizer.schedule = "cosine"
    c.pretrain.updates = 300
    c.warm_start.demonstrations = 3440  # one of each training question
    c.warm_start.practice = 0.0
    c.warm_start.batch = 16
    c.eval.split = "held_out"
    c.eval.questions = 128
    c.eval.every = 0
    return c
