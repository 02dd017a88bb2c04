"""Configs with some keys changed."""

from __future__ import annotations

import ml_collections


def changed(config, **changes):
    """A config, or that of a module, with some keys (`__` for the dots) changed, as the command line does it."""
    made = config if isinstance(config, ml_collections.ConfigDict) else config.get_config()
    with ml_collections.ConfigDict(made).unlocked() as made:
        made.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return made
