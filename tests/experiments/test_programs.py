"""Tests of programs can be collected beside each other, whichever are chosen."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))


def test_a_test_takes_a_program_through_program_since_flags_have_equal_names():
    files = (ROOT / "experiments").glob("*.py")
    programs = {f"experiments.{file.stem}" for file in files if "flags.DEFINE" in file.read_text()}
    assert {"experiments.train", "experiments.ask", "experiments.kill_test"} <= programs
    for test in (ROOT / "tests").rglob("*.py"):
        direct = programs & set(imported(test.read_text()))
        assert not direct, f"{test.name}: use programs.program for {', '.join(sorted(direct))}"
