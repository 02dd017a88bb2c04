"""Credit assignment: pure functions from a `TokenBatch` to advantages and value targets, and their registry."""

from agentr1_jax.credit import anchors, belief, group, temporal  # noqa: F401 - registers the schemes
from agentr1_jax.credit.batch import Credit, TokenBatch
from agentr1_jax.credit.primitives import (
    Norm,
    Unit,
    Whitening,
    broadcast_to_steps,
    broadcast_to_tokens,
    center_by_group,
    gae_over_steps,
    gae_over_tokens,
    group_ids,
    mean_of_tokens,
    normalise_by_group,
    step_returns,
    sum_to_steps,
    token_returns,
    whiten_steps,
    whiten_term,
    whiten_tokens,
)
from agentr1_jax.credit.scheme import SCHEMES, Scheme, get_scheme, register
from agentr1_jax.trajectory import Term

__all__ = [
    "SCHEMES",
    "Credit",
    "Norm",
    "Scheme",
    "Term",
    "TokenBatch",
    "Unit",
    "Whitening",
    "broadcast_to_steps",
    "broadcast_to_tokens",
    "center_by_group",
    "gae_over_steps",
    "gae_over_tokens",
    "get_scheme",
    "group_ids",
    "mean_of_tokens",
    "normalise_by_group",
    "register",
    "step_returns",
    "sum_to_steps",
    "token_returns",
    "whiten_steps",
    "whiten_term",
    "whiten_tokens",
]
