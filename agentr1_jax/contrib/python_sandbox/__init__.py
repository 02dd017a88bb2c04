"""The tool `python`: it runs a program of the policy in a sandbox made by bubblewrap."""

from agentr1_jax.contrib.python_sandbox.limits import SandboxLimits
from agentr1_jax.contrib.python_sandbox.tool import PythonTool

__all__ = ["PythonTool", "SandboxLimits"]
