"""A Model Context Protocol server behind streamable HTTP, by the official library: `python mcp_http_server.py PORT`."""

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("sums", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def sleep(seconds: float) -> str:
    """Takes its time."""
    time.sleep(seconds)
    return "slept"


if __name__ == "__main__":
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
