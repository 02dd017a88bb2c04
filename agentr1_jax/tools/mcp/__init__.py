"""Tools of Model Context Protocol servers, by the official client library."""

from agentr1_jax.tools.mcp.tools import McpTool, McpTools

__all__ = ["McpTool", "McpTools"]
