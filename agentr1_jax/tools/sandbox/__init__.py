"""The python tool: a policy's code, a subprocess for each call, in namespaces and within limits."""

from agentr1_jax.tools.sandbox.isolation import isolations
from agentr1_jax.tools.sandbox.limits import SandboxLimits
from agentr1_jax.tools.sandbox.tool import PythonTool

__all__ = ["PythonTool", "SandboxLimits", "isolations"]
