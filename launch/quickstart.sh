#!/usr/bin/env bash
# Trains an agent to use a search tool on this machine's CPU: `bash launch/quickstart.sh [--config.seed=1 ...]`.
# Relative paths in the flags are relative to the project's folder.
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$VENV_PYTHON" -m experiments.train --config=configs/quickstart.py "$@"
