"""Serve the task of a config over HTTP, by the protocol of docs/contrib/http_env.md.

python -m experiments.serve_env --config=configs/frozenlake.py --port=8100
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags, logging

from agentr1_jax.contrib.http_env.server import make_server
from agentr1_jax.http import serve
from agentr1_jax.runtime import config as configs
from agentr1_jax.tools.wrappers import ToolMetrics
from experiments.setup import make_task, read_settings, run_main

CONFIG = configs.define_config_flag()
HOST = flags.DEFINE_string("host", "127.0.0.1", "address to listen at; whoever reaches it can use the task")
PORT = flags.DEFINE_integer("port", 8100, "port to listen at")


def main(argv: Sequence[str]) -> None:
    """Serve until stopped."""
    del argv
    settings = read_settings(CONFIG.value)
    server = make_server(make_task(settings, ToolMetrics()), HOST.value, PORT.value)
    logging.info("serving %s at http://%s:%d", settings.task.name, *server.server_address[:2])
    serve(server)


if __name__ == "__main__":
    run_main(main)
