"""The mistakes that users make most: each is refused by a message that names the key, before JAX compiles anything."""

from __future__ import annotations

import pytest
from changes import changed
from configured import configured_task

from agentr1_jax.errors import UserError
from configs import countdown, keydoor, multihop_tiny, quickstart

NO_ARGUMENTS = {"credit__args__gamma": None, "credit__args__lam": None}
MISTAKES = [
    (quickstart, {"credit__name": "gae"}, "credit.name: unknown credit scheme 'gae'; choose one of bilevel_gae"),
    (quickstart, {"credit__args__lamda": 0.9}, "credit scheme 'step_gae' has no argument 'lamda'; it has"),
    (quickstart, {"critic": "none"}, "credit scheme 'step_gae' needs a critic"),
    (quickstart, {"critic": "shared"}, "critic is 'shared'; it must"),
    (quickstart, {"credit__name": "grpo", **NO_ARGUMENTS, "rollout__samples": 1}, "rollout.samples"),
    (quickstart, {"learner__row_tokens": 64}, r"learner.row_tokens \(64\) is less than budget.context_tokens"),
    (quickstart, {"budget__response_tokens": 4096}, r"budget: response_tokens \(4096\) leaves no room for a prompt"),
    (quickstart, {"policy__weights": "models/x"}, "policy: set one of weights and preset"),
    (quickstart, {"policy__heads": 0}, "policy.heads is 0; it must be greater than or equal to 1"),
    (quickstart, {"optimizer__lr": -1.0}, "optimizer.lr is -1.0; it must be greater than or equal to 0"),
    (quickstart, {"optimizer__lr": float("nan")}, "optimizer.lr is nan; it must be a finite number"),
    (quickstart, {"kl__kind": "k4"}, "kl.kind is 'k4'; it must be"),
    (quickstart, {"context__rule": "window"}, "context.rule"),
    (quickstart, {"rollout__temperature": -1.0}, "rollout.temperature is -1.0; it must be"),
    (quickstart, {"checkpoint__every": 0}, "checkpoint.every is 0; it must be greater than or equal to 1"),
    (quickstart, {"seed": -1}, "seed is -1; it must be greater than or equal to 0"),
    (quickstart, {"run_dir": ""}, "run_dir"),
    (quickstart, {"eval__split": "test"}, "eval.split: hopworld has no row 'test' 0; splits are"),
    (quickstart, {"task__name": "hopwrld"}, "task.name: unknown task 'hopwrld'; choose one of"),
    (countdown, {"task__mixture": ("keydoor(weight=1)",)}, "only task 'mixture' reads, and task.name is 'countdown'"),
    (keydoor, {"task__curriculum": ("max_steps(99)",)}, "task.curriculum"),
    (multihop_tiny, {"task__data_dir": "nowhere"}, "nowhere"),
]


@pytest.mark.parametrize(("config", "changes", "message"), MISTAKES)
def test_a_mistake_is_refused_by_name(config, changes, message):
    with pytest.raises(UserError, match=message):
        configured_task(changed(config, **changes))
