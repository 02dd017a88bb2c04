"""The tool `python`: it runs a program of the policy in a sandbox made by bubblewrap."""

from agentr1_jax.contrib.python_sandbox.bubblewrap import SandboxLimits as SandboxLimits
from agentr1_jax.contrib.python_sandbox.tool import PythonTool as PythonTool
