"""Weights of published models: reading and writing of Hugging Face folders and hub ids."""

from agentr1_jax.policy.weights.hf_config import find_family, from_hf, to_hf
from agentr1_jax.policy.weights.load import load, read_config
from agentr1_jax.policy.weights.save import save

__all__ = ["find_family", "from_hf", "load", "read_config", "save", "to_hf"]
