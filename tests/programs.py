"""Programs of `experiments/` beside each other in one process."""

from __future__ import annotations

import importlib
import types

from absl import flags

DEFINES_CONFIG = "agentr1_jax.runtime.config"


def program(name: str) -> types.ModuleType:
    """Imports a program. Each defines its flags as it is imported: those of others, of which some have equal names, go.

    So tests may call its functions, but its flags have no values.
    """
    for flag in list(flags.FLAGS):
        module = flags.FLAGS.find_module_defining_flag(flag)
        if module == DEFINES_CONFIG or module.startswith("experiments."):
            delattr(flags.FLAGS, flag)
    return importlib.import_module(f"experiments.{name}")
