"""Tasks and tools that the core never imports: a module is imported when a config names what it registers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

TASK_MODULES: Mapping[str, str] = {
    "bfcl": "agentr1_jax.contrib.bfcl.task",
    "gymnasium": "agentr1_jax.contrib.gymnasium",
    "http": "agentr1_jax.contrib.http_env.client",
    "sokoban": "agentr1_jax.contrib.sokoban",
    "verifiers": "agentr1_jax.contrib.verifiers",
}
"""Task name -> the module that registers it."""

TOOLS: Mapping[str, str] = {"python": "agentr1_jax.contrib.python_sandbox:PythonTool"}
"""Tool name -> `module:class` of a tool that is made without arguments."""


def read_arguments(key: str, text: str) -> dict[str, Any]:
    """Return keyword arguments that the config writes as the text of a JSON object; "" for none. Raises ValueError."""
    try:
        arguments = json.loads(text or "{}")
        if not isinstance(arguments, dict):
            raise TypeError("it is no object")
    except (ValueError, TypeError) as error:
        raise ValueError(
            f'{key}: {text!r} is not the text of a JSON object ({error}); write e.g. {{"size": 8}}'
        ) from error
    return arguments
