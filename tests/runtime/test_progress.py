"""Progress: lines in a log where there is no terminal, a bar where there is one, silence in other processes."""

from __future__ import annotations

import io
import types

from rich.console import Console

from agentr1_jax.runtime import monitoring
from agentr1_jax.runtime.monitoring import progress_bar


def test_without_a_terminal_lines_come_now_and_then_and_at_the_end(monkeypatch, caplog):
    clock = iter([100.0, 101.0, 105.0, 110.5, 111.5, 112.0])
    monkeypatch.setattr(monitoring, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    caplog.set_level("INFO", logger="absl")
    with progress_bar("rl", 0, 5, enabled=True) as show:
        for update in range(1, 6):
            show(update, f"reward {update}")
    assert [record.getMessage() for record in caplog.records] == [
        "rl 1/5, 4 s left  reward 1",
        "rl 4/5, 3 s left  reward 4",
        "rl 5/5, 0 s left  reward 5",
    ]


def test_other_processes_say_nothing(caplog, capsys):
    caplog.set_level("INFO", logger="absl")
    with progress_bar("rl", 0, 1, enabled=False) as show:
        show(1, "reward 1")
    assert not caplog.records and capsys.readouterr().err == ""


def test_on_a_terminal_a_resumed_bar_starts_where_the_phase_was(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(monitoring, "Console", lambda stderr: Console(file=out, force_terminal=True, width=120))
    with progress_bar("warm start", 30, 40, enabled=True) as show:
        show(31, "loss 0.5")
    assert "warm start" in out.getvalue() and "31/40" in out.getvalue() and "loss 0.5" in out.getvalue()
