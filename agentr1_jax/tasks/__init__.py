"""Tasks of the core: each module registers its task and owns the dataclass of its config keys."""

from __future__ import annotations

from collections.abc import Mapping

TASK_MODULES: Mapping[str, str] = {
    "countdown": "agentr1_jax.tasks.countdown",
    "frozenlake": "agentr1_jax.tasks.frozenlake",
    "gsm8k": "agentr1_jax.tasks.gsm8k",
    "hopworld": "agentr1_jax.tasks.hopworld.task",
    "keydoor": "agentr1_jax.tasks.keydoor",
    "multihop": "agentr1_jax.tasks.multihop.task",
    "whereabouts": "agentr1_jax.tasks.whereabouts",
}
"""Task name -> the module that registers it, imported when a config names the task."""
