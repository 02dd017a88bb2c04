#!/usr/bin/env bash
# Runs the fast tests of the core on all cores; `bash launch/test.sh -m contrib` runs those of agentr1_jax/contrib,
# `-m slow` the slow ones, `-m nightly` those of the launchers, kills and buckets. Arguments go to pytest.
# Files keep the order that tests/conftest.py gives them: those that compile most come first.
# PYTHON=/path/to/python3.12 selects another interpreter.
# shellcheck disable=SC2034
development=1
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$VENV_PYTHON" -m pytest -n auto --dist loadfile --no-loadscope-reorder "$@"
