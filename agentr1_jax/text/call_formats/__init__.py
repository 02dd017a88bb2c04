"""Tool-call formats of policies; environments and experts know only the common format."""

from __future__ import annotations

from agentr1_jax.text.call_formats import code, hermes, llama3, react
from agentr1_jax.text.call_formats.base import CallFormat as CallFormat
from agentr1_jax.text.tokenizer import Tokenizer

CALL_FORMATS = ("auto", "hermes", "llama3", "code", "react")


def make_call_format(name: str, tokenizer: Tokenizer) -> CallFormat:
    """Return the call format of a name; `auto` is the one in which the tokenizer's chat template writes calls.

    Raises:
      ValueError: unknown name, or a tokenizer without tags for a format that needs them.
    """
    if name == "auto":
        name = "llama3" if hermes.writes_bare_json(tokenizer) else "hermes"
    if name == "hermes":
        return hermes.call_format(hermes.call_tags(tokenizer))
    if name == "llama3":
        return llama3.call_format(tokenizer)
    if name == "code":
        return code.call_format()
    if name == "react":
        return react.call_format()
    raise ValueError(f"unknown call format {name!r}; choose one of {', '.join(CALL_FORMATS)}")
