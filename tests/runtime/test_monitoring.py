"""The progress bar, and the profiler switch: which batches it traces, and traces that end whatever happens."""

from __future__ import annotations

import contextlib
import io
import types

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from agentr1_jax.errors import UserError
from agentr1_jax.runtime import monitoring
from agentr1_jax.runtime.monitoring import parse_profile_updates, progress_bar, trace_updates


def test_without_a_terminal_lines_come_now_and_then_and_at_the_end(monkeypatch, caplog):
    clock = iter([100.0, 101.0, 105.0, 110.5, 111.5, 112.0, 120.0, 121.0])
    monkeypatch.setattr(monitoring, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    caplog.set_level("INFO", logger="absl")
    with progress_bar("rl", 0, 5, enabled=True) as show:
        for update in range(1, 6):
            show(update, f"reward {update}")
    with progress_bar("rl", 0, 1, enabled=False) as show:
        show(1, "reward 1")  # Another process says nothing.
    assert [record.getMessage() for record in caplog.records] == [
        "rl 1/5, 4 s left  reward 1",
        "rl 4/5, 3 s left  reward 4",
        "rl 5/5, 0 s left  reward 5",
    ]


def test_on_a_terminal_a_resumed_bar_starts_where_the_phase_was(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(monitoring, "Console", lambda stderr: Console(file=out, force_terminal=True, width=120))
    with progress_bar("warm start", 30, 40, enabled=True) as show:
        show(31, "loss 0.5")
    assert "warm start" in out.getvalue() and "31/40" in out.getvalue() and "loss 0.5" in out.getvalue()


def test_updates_are_half_open_ranges():
    assert list(parse_profile_updates("3:5")) == [3, 4]
    assert not parse_profile_updates("")
    for text in ("3", "3:", "5:3", "3:3", "-1:3", "a:b", "1:2:3", "1:2\n", "1.0:2"):
        with pytest.raises(UserError, match="profile_updates is .*a:b"):
            parse_profile_updates(text)


class Spy:
    """Stands in for `jax.profiler` and notes what begins and ends."""

    ProfileOptions = jax.profiler.ProfileOptions

    def __init__(self):
        self.seen = []

    def trace(self, folder, profiler_options):
        return self._between("trace")

    def StepTraceAnnotation(self, name, step_num):
        return self._between(f"{name} {step_num}")

    @contextlib.contextmanager
    def _between(self, name):
        self.seen.append(f"+{name}")
        try:
            yield
        finally:
            self.seen.append(f"-{name}")


@pytest.mark.parametrize(
    ("batches", "seen"),
    [
        (range(0, 5), ["+trace", "+rl 1", "-rl 1", "+rl 2", "-rl 2", "-trace"]),
        (range(2, 3), ["+trace", "+rl 2", "-rl 2", "-trace"]),
        (range(3, 5), []),
    ],
)
def test_the_trace_covers_the_batches_and_no_more(monkeypatch, tmp_path, batches, seen):
    spy = Spy()
    monkeypatch.setattr(monitoring, "jax", type("jax", (), {"profiler": spy}))
    with trace_updates(tmp_path, range(1, 3), enabled=True) as begin:
        for update in batches:
            begin(update)
            if update == 3:
                assert spy.seen == seen
    assert spy.seen == seen


def test_a_trace_is_written_also_when_the_run_is_stopped(tmp_path):
    with trace_updates(tmp_path, range(0, 3), enabled=False) as begin:
        begin(0)
    assert not list(tmp_path.iterdir())

    def stop_in_the_middle():
        with trace_updates(tmp_path, range(1, 9), enabled=True) as begin:
            for update in range(3):
                begin(update)
                jnp.arange(4.0).sum().block_until_ready()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_in_the_middle()
    (found,) = tmp_path.glob("profile/plugins/profile/*/*.xplane.pb")
    assert found.stat().st_size > 0
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()
