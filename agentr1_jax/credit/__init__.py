"""Credit assignment: pure functions from a `CreditBatch` to advantages and value targets, and their registry."""

from agentr1_jax.credit import group, state, temporal  # noqa: F401 - registers the schemes
from agentr1_jax.credit.batch import Credit, CreditBatch
from agentr1_jax.credit.registry import SCHEMES, Scheme, get_scheme, register

__all__ = ["SCHEMES", "Credit", "CreditBatch", "Scheme", "get_scheme", "register"]
