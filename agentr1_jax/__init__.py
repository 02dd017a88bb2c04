"""agentr1_jax: reinforcement learning of multi-step tool-using LLM agents, native to JAX."""

__version__ = "0.1.0"
