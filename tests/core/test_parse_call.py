"""The mini-language of config strings."""

from __future__ import annotations

import pytest

from agentr1_jax.registry import Call, parse_call, split_list


def test_values_have_types():
    text = "a( x = 1 , y=.5,z=true, w=none, q='a,(b)', r=hello-x)"
    assert parse_call(text, "k") == Call(
        "a", (), {"x": 1, "y": 0.5, "z": True, "w": None, "q": "a,(b)", "r": "hello-x"}
    )
    assert parse_call("a(3, -2)", "k") == Call("a", (3, -2)) and parse_call("a()", "k") == parse_call(" a ", "k")
    assert parse_call("a(1, c=3)", "k").bind(["b", "c"]) == {"b": 1, "c": 3}
    assert split_list("a(1,2), b ,c('x,y')") == ["a(1,2)", " b ", "c('x,y')"] and split_list(" ") == []


@pytest.mark.parametrize(
    "text", ["", "a(", "a)", "a((1))", "a(,)", "a(1,)", "a(x=)", "a b", "a(x=1,x=2)", "a(x==1)", "a('1)"]
)
def test_anything_else_is_refused_with_its_key(text):
    with pytest.raises(ValueError, match=r"some\.key: cannot read"):
        parse_call(text, "some.key")


@pytest.mark.parametrize("text", ["a(1,2)", "a(c=1)", "a(1,b=2)"])
def test_arguments_that_do_not_fit_are_refused(text):
    with pytest.raises(ValueError, match="a takes b"):
        parse_call(text, "k").bind(["b"])
