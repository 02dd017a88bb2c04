"""A task of your own: GRPO on the task that your file registers, with published weights.

    python -m experiments.train --config=configs/blank.py:my_tasks.py:guess \
        --config.policy.weights=Qwen/Qwen2.5-0.5B-Instruct

`python -m experiments.try_task my_tasks.py:guess` plays an episode first, and checks the task. On a CPU, without a
download: `--config.policy.preset=tiny --config.optimizer.lr=3e-4`, random weights and a tokenizer of the task's texts.
Keys of the task are set by `--config.task.args.KEY=...`. A task of this project goes by its name alone:
`configs/blank.py:countdown`.
"""

from __future__ import annotations

import ml_collections

from agentr1_jax.envs.registry import TASKS
from agentr1_jax.errors import UserError, user_error
from agentr1_jax.validation import to_section
from configs import base


def get_config(task: str = "") -> ml_collections.ConfigDict:
    """Groups of 8 episodes of at most 8 steps, contexts of 2048 tokens; no warm start.

    Args:
      task: `FILE.py:NAME`, a task that the file registers; `FILE.py` where it registers one; or the name of a task of
        this project.
    """
    file, _, name = (task, "", "") if task.endswith(".py") else task.rpartition(":")
    if not file and not name:
        raise UserError("name your task behind the config, configs/blank.py:FILE.py:NAME, e.g. my_tasks.py:guess")
    c = base.get_config(*([] if file else [name]))
    if file:
        name = _set_own_task(c, file, name)
    c.run_dir = f"runs/{name}"
    c.hardware = "auto"
    c.budget.max_steps = 8
    c.budget.response_tokens = 256
    c.budget.observation_tokens = 512
    c.budget.context_tokens = 2048
    c.budget.trajectory_tokens = 8192
    c.budget.on_truncated_response = "continue"  # the task answers what it cannot read
    c.rollout.groups = 8
    c.rollout.samples = 8
    c.optimizer.lr = 1e-6  # of published weights; adapters take 1e-5, random weights 3e-4
    c.eval.questions = 64
    c.eval.quick_questions = 32
    return c


def _set_own_task(c: ml_collections.ConfigDict, file: str, name: str) -> str:
    """Set a task of a file, and its keys with their defaults in the section `task.args`; return its name."""
    with user_error():
        TASKS.load(file)
    own = [known for known in TASKS if known not in base.TASK_MODULES]
    name = name or (own[0] if len(own) == 1 else "")
    if name not in own:
        raise UserError(f"{file}:{name}: no such task; write FILE.py:NAME, the file registers {', '.join(own)}")
    c.task.file, c.task.name = file, name
    keys = TASKS[name].config
    if keys is not None:
        with c.unlocked():
            c.task.args = ml_collections.ConfigDict(to_section(keys))
    return name
