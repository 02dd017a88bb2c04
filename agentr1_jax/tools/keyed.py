"""Chance keyed by what it is for, so that a run can be repeated whatever the order of its calls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def canonical(arguments: Mapping[str, Any]) -> str:
    """Arguments as JSON text, equal for equal arguments."""
    return json.dumps(dict(arguments), sort_keys=True, default=repr)


def uniform(*key: str | int) -> float:
    """A number u with 0 <= u < 1, uniform over keys; equal keys have equal numbers in every process."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53
