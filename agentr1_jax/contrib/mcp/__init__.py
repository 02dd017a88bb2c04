"""Tools of Model Context Protocol servers, by the official client library."""

from agentr1_jax.contrib.mcp.tools import McpTool, McpTools

__all__ = ["McpTool", "McpTools"]
