"""Compare the metrics of two runs value for value, through the table of renamed keys.

    python tests/compare_metrics.py OLD/metrics.jsonl NEW/metrics.jsonl

Keys under `time/` are left out. Status 1 if anything differs.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

RENAMED = {
    "batch/dead_groups": "batch/zero_variance_groups",
    "batch/fill": "batch/row_occupancy",
    "batch/refills": "batch/dynamic_sampling_groups",
    "eval/kept": "eval/summary_score",
    "rollout/kept": "rollout/summary_score",
    "rollout/moved_tokens": "rollout/copied_tokens",
    "tools/threads_left_behind": "tools/abandoned_threads",
}
"""Keys of metrics in version 0.1.0 -> keys since."""


def records(path: str) -> list[dict[str, Any]]:
    """Records of a metrics file under today's keys, without times."""
    lines = pathlib.Path(path).read_text().splitlines()
    return [
        {RENAMED.get(key, key): value for key, value in json.loads(line).items() if not key.startswith("time/")}
        for line in lines
    ]


def differences(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    """Describe every key that differs, a line each."""
    found = [f"{len(old)} records, {len(new)} records"] if len(old) != len(new) else []
    for i, (a, b) in enumerate(zip(old, new, strict=False)):
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                found.append(f"record {i} ({a.get('phase')} {a.get('update')}): {key}: {a.get(key)!r}, {b.get(key)!r}")
    return found


if __name__ == "__main__":
    different = differences(*map(records, sys.argv[1:]))
    sys.stdout.write("\n".join(different) + "\n" if different else "equal\n")
    sys.exit(bool(different))
