"""What users write in configs: the mini-language of its strings, and mistakes that are refused by name."""

from __future__ import annotations

import pytest
from changes import changed
from configured import configured_task

from agentr1_jax.errors import UserError
from agentr1_jax.registry import Call, parse_call, split_list
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


def test_values_have_types():
    text = "a( x = 1 , y=.5,z=true, w=none, q='a,(b)', r=hello-x)"
    assert parse_call(text, "k") == Call(
        "a", (), {"x": 1, "y": 0.5, "z": True, "w": None, "q": "a,(b)", "r": "hello-x"}
    )
    assert parse_call("a(3, -2)", "k") == Call("a", (3, -2)) and parse_call("a()", "k") == parse_call(" a ", "k")
    assert parse_call("a(1, c=3)", "k").bind(["b", "c"]) == {"b": 1, "c": 3}
    assert split_list("a(1,2), b ,c('x,y')") == ["a(1,2)", " b ", "c('x,y')"] and split_list(" ") == []


@pytest.mark.parametrize("text", ["", "a(", "a)", "a((1))", "a(,)", "a(x=)", "a b", "a(x=1,x=2)", "a('1)"])
def test_anything_else_is_refused_with_its_key(text):
    with pytest.raises(ValueError, match=r"some\.key: cannot read"):
        parse_call(text, "some.key")


@pytest.mark.parametrize("text", ["a(1,2)", "a(c=1)", "a(1,b=2)"])
def test_arguments_that_do_not_fit_are_refused(text):
    with pytest.raises(ValueError, match="a takes b"):
        parse_call(text, "k").bind(["b"])
