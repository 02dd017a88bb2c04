"""Dialects: the formats in which policies write tool calls; environments and experts know only the house's."""

from __future__ import annotations

from agentr1_jax.text.dialects import code, hermes, llama3, react
from agentr1_jax.text.dialects.base import Dialect as Dialect
from agentr1_jax.text.tokenizer import Tokenizer

DIALECTS = ("auto", "hermes", "llama3", "code", "react")


def make_dialect(name: str, tokenizer: Tokenizer) -> Dialect:
    """The dialect of a name; `auto` is the one in which the tokenizer's chat template writes calls.

    Raises:
      ValueError: unknown name, or a tokenizer that has no tags for the dialect that needs them.
    """
    if name == "auto":
        name = "llama3" if hermes.writes_bare_json(tokenizer) else "hermes"
    if name == "hermes":
        return hermes.dialect(hermes.call_tags(tokenizer))
    if name == "llama3":
        return llama3.dialect(tokenizer)
    if name == "code":
        return code.dialect()
    if name == "react":
        return react.dialect()
    raise ValueError(f"unknown dialect {name!r}; choose one of {', '.join(DIALECTS)}")
