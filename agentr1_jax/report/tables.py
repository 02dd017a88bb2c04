"""Numbers as tables: for the terminal, as Markdown, as CSV."""

from __future__ import annotations

import csv
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from agentr1_jax import files
from agentr1_jax.errors import inert


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


def summary_table(summary: Mapping[str, Any], *, title: str) -> Table:
    """A two-column rich table of `summary`, nested names dotted; texts are not markup, nor obeyed by the terminal."""
    table = Table(title=Text(inert(title)), show_header=False, title_justify="left")
    table.add_column("name", style="dim", no_wrap=True)
    table.add_column("value", justify="right", style="bold")
    for name, value in flatten(summary).items():
        table.add_row(Text(inert(name)), Text(inert(format_value(value))))
    return table


def markdown_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Rows as a GitHub markdown table; columns default to all keys in order of first appearance."""
    columns = columns or list(dict.fromkeys(key for row in rows for key in row))

    def line(cells: Sequence[str]) -> str:
        escaped = (cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for cell in cells)
        return "| " + " | ".join(escaped) + " |"

    head = [line(columns), "|" + " --- |" * len(columns)]
    return "\n".join(head + [line([format_value(row.get(name)) for name in columns]) for row in rows]) + "\n"


def write_csv(path: files.PathLike, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with equal keys as CSV, which appears whole.

    A text that a spreadsheet would run gets a quote before it.
    """

    def quote(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(tuple("=+-@\t\r")) else value

    with files.atomic_write(path, errors="replace", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: quote(value) for name, value in row.items()} for row in rows)
