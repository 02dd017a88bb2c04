"""Summary numbers as tables for the terminal, for markdown and for the inspector."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level with dotted names: `{"em": {"bridge": 1}}` becomes `{"em.bridge": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        flat.update(flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat


def format_value(value: Any) -> str:
    """A value as people read it: `1,234`, `0.938`, `yes`, `-` for None."""
    if value is None:
        return "-"
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        value = value.item()
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}"
    if isinstance(value, numbers.Real):
        magnitude = abs(float(value))
        if magnitude != 0 and magnitude < 1e-3:
            return f"{float(value):.2e}"
        return f"{float(value):.3f}" if magnitude < 10 else f"{float(value):,.1f}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(format_value(item) for item in value)
    return str(value)


def summary_table(summary: Mapping[str, Any], *, title: str | None = None) -> Table:
    """A two-column rich table of `summary`, nested names dotted; values are never read as rich markup."""
    table = Table(title=None if title is None else Text(title), show_header=False, title_justify="left")
    table.add_column("name", style="dim", no_wrap=True)
    table.add_column("value", justify="right", style="bold")
    for name, value in flatten(summary).items():
        table.add_row(Text(name), Text(format_value(value)))
    return table


def markdown_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Rows as a GitHub markdown table; columns default to all keys in order of first appearance."""
    if columns is None:
        columns = list(dict.fromkeys(key for row in rows for key in row))

    def line(cells: Sequence[str]) -> str:
        escaped = (cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for cell in cells)
        return "| " + " | ".join(escaped) + " |"

    head = [line(columns), "|" + " --- |" * len(columns)]
    return "\n".join(head + [line([format_value(row.get(name)) for name in columns]) for row in rows]) + "\n"
