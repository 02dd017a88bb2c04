"""Tasks and tools that the core never imports: a module is imported when a config names what it registers."""

from __future__ import annotations

from collections.abc import Mapping

TASK_MODULES: Mapping[str, str] = {
    "bfcl": "agentr1_jax.contrib.bfcl.task",
    "gymnasium": "agentr1_jax.contrib.gymnasium.task",
    "http": "agentr1_jax.contrib.http_env.client",
    "sokoban": "agentr1_jax.contrib.sokoban",
    "verifiers": "agentr1_jax.contrib.verifiers",
}
"""Task name -> the module that registers it."""

TOOLS: Mapping[str, str] = {"python": "agentr1_jax.contrib.python_sandbox:PythonTool"}
"""Tool name -> `module:class` of a tool that is made without arguments."""
